"""Steps of an advice for a decoder: key heads that stream, ranked, counted by bisection and verified."""

import json
import random
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean, stdev

from efficient_attn.backends.by_head import NAME as BY_HEAD
from efficient_attn.integrations.transformers.assignment import Choice
from efficient_attn.integrations.transformers.head_scores import head_scores
from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.record import replace as with_values
from efficient_attn.measure.variants import OWN, PLAN, Variant
from efficient_attn.measure.worker import answer
from efficient_attn.studies.advise.model import timed_pass
from efficient_attn.studies.advise.outcomes import Targets
from efficient_attn.studies.advise.plan import HEADS, RANDOM_HEADS, RETRIEVAL
from efficient_attn.studies.study import Point, Steps
from efficient_attn.studies.swap import measure
from efficient_attn.studies.swap.model import TextSubject
from efficient_attn.studies.swap.subject import WINDOW, Subject

# What a streaming head keeps.
STREAMING = Choice(WINDOW, {"window": 512, "global_tokens": 4})

# Plans that the bisection tries: the count is known to a 32nd of all heads then.
_TRIALS = 5

Heads = Mapping[int, Sequence[int]]


def head_steps(choosing: TextSubject, held_out: TextSubject, targets: Targets, *, rounds: int) -> Steps:
    """Rank the key heads, let as many stream as the targets allow, and verify on held-out texts."""
    case = choosing.case(HEADS, Variant(backend=OWN, label=OWN, target=OWN))
    record = yield Point(
        case=case,
        measure=partial(answer, case, partial(_scored, case, choosing)),
        label=f"rank of the key heads, {case.tokens} tokens",
        series=OWN,
        cost=float(case.tokens),
    )
    if record.status != "ok":
        return
    ranked = _ranked(record, choosing)
    most, fewest = len(ranked), 0
    for number in range(_TRIALS):
        count = len(ranked) // 3 if number == 0 else (fewest + most) // 2
        if count in (fewest, most):
            break
        record = yield _planned(choosing, f"{PLAN} {number + 1}", _by_layer(ranked[:count]))
        if record.status != "ok":
            return
        fewest, most = (fewest, count) if targets.halved().missed(record) else (count, most)
    heads = _by_layer(ranked[:fewest])
    vars(choosing).pop("exact", None)
    yield _planned(held_out, PLAN, heads)
    if heads:
        # As many heads, drawn by chance: what the rank is worth.
        drawn = random.Random(choosing.shared["seed"]).sample(sorted(ranked), fewest)
        yield _planned(held_out, RANDOM_HEADS, _by_layer(drawn))
        variants = (Variant(backend=OWN, label=OWN, target=OWN), _variant(PLAN, heads, held_out))
        yield [timed_pass(held_out, variant, rounds=rounds) for variant in variants]
        yield _retrieved(held_out, variants[1])
    vars(held_out).pop("exact", None)


def _ranked(record: Record, subject: Subject) -> list[tuple[int, int]]:
    """(layer, key head), the least needed first; in their order where the scores are still to be measured."""
    if record.head_scores is None:
        return [(layer, head) for layer in subject.layers for head in range(_kv_heads(subject))]
    scores = sorted(json.loads(record.head_scores), key=lambda row: row[2])
    return [(layer, head) for layer, head, _ in scores]


def _kv_heads(subject: Subject) -> int:
    """Key heads of a layer."""
    return int(subject.shared["num_kv_heads"] or subject.shared["num_heads"])


def _by_layer(heads: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    return {layer: sorted(head for place, head in heads if place == layer) for layer, _ in sorted(heads)}


def _scored(case: Case, subject: TextSubject) -> Record:
    scores = head_scores(subject.model, subject.sites, subject.texts, STREAMING)
    rows = [(layer, head, score) for layer, row in scores.items() for head, score in enumerate(row)]
    return Record(case=case, head_scores=json.dumps(rows))


def _variant(label: str, heads: Heads, subject: Subject) -> Variant:
    """The plan as one variant; its option tells plans apart."""
    target = {}
    for layer, numbers in heads.items():
        part = {"heads": {",".join(map(str, numbers)): tuple(STREAMING)}}
        target[layer] = STREAMING if len(numbers) == _kv_heads(subject) else Choice(BY_HEAD, part)
    return Variant(backend=PLAN, label=label, target=target, options={"layers": json.dumps(heads)})


def _planned(subject: TextSubject, label: str, heads: Heads) -> Point:
    """Loss and recall of a plan; without heads the record is the decision for none."""
    variant = _variant(label, heads, subject)
    case = subject.case("swap", variant)
    return Point(
        case=case,
        measure=partial(answer, case, partial(_plan_record, case, variant, subject, heads)),
        label=f"{label}, {sum(map(len, heads.values()))} heads stream, {case.tokens} tokens",
        series=OWN,
        cost=float(case.tokens),
    )


def _plan_record(case: Case, variant: Variant, subject: TextSubject, heads: Heads) -> Record:
    record = measure.distance(case, variant, subject, draws=1) if heads else Record(case=case)
    if record.status != "ok":
        return record
    streaming = {
        str(layer): f"{STREAMING.backend} in key heads {', '.join(map(str, numbers))}"
        for layer, numbers in heads.items()
    }
    return with_values(
        record,
        chosen_layers=json.dumps(streaming),
        attached_layers=json.dumps(subject.plan(variant)) if heads else None,
        streaming_heads=sum(map(len, heads.values())),
        key_heads=_kv_heads(subject) * len(subject.layers),
    )


def _retrieved(subject: TextSubject, variant: Variant) -> Point:
    case = subject.case(RETRIEVAL, variant)
    return Point(
        case=case,
        measure=partial(answer, case, partial(_retrieval, case, variant, subject)),
        label=f"{variant.label}, {case.tokens} tokens, numbers in a text",
        series=RETRIEVAL,
        cost=float(case.tokens),
    )


def _retrieval(case: Case, variant: Variant, subject: TextSubject) -> Record:
    """Share of planted numbers that the plan finds, beside the model with its own attention."""
    exact = subject.right_answers()
    with subject.replaced(variant):
        answers = subject.right_answers()
    differences = [float(a) - float(b) for a, b in zip(answers, exact, strict=True)]
    return Record(
        case=case,
        retrieval=fmean(answers),
        retrieval_exact=fmean(exact),
        retrieval_error=stdev(differences) / len(differences) ** 0.5,
        numbers=len(exact),
    )
