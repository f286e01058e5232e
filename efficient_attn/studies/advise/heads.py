"""Steps of an advice for a decoder: key heads that stream, ranked, counted by bisection and verified."""

import json
import random
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from efficient_attn.backends.by_head import NAME as BY_HEAD
from efficient_attn.integrations.transformers.assignment import EXACT, Choice
from efficient_attn.integrations.transformers.attachment import installed
from efficient_attn.integrations.transformers.sites import AttentionSite
from efficient_attn.integrations.transformers.swapping import AttentionSites, build_layers, forward
from efficient_attn.measure.copies import copies_begin
from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.variants import OWN, PLAN, Variant
from efficient_attn.measure.worker import answer
from efficient_attn.studies.advise.outcomes import Targets
from efficient_attn.studies.advise.plan import HEADS, RANDOM_HEADS, RETRIEVAL
from efficient_attn.studies.study import Point, Steps
from efficient_attn.studies.swap.measure import (
    OWN_ATTENTION,
    WINDOW,
    Subject,
    case_of,
    pass_point,
    plan_point,
)
from efficient_attn.studies.swap.model import TextSubject

# What a streaming head keeps.
STREAMING = Choice(WINDOW, {"window": 512, "global_tokens": 4})

# Plans that the bisection tries: the count is known to a 32nd of all heads then.
_TRIALS = 5

Heads = Mapping[int, Sequence[int]]


def head_steps(choosing: TextSubject, held_out: TextSubject, targets: Targets, *, rounds: int) -> Steps:
    """Rank the key heads, let as many stream as the targets allow, and verify on held-out texts."""
    case = case_of(choosing, HEADS, OWN_ATTENTION)
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
        count = max(len(ranked) // 3, 1) if number == 0 else (fewest + most) // 2
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
        variants = (OWN_ATTENTION, _variant(PLAN, heads, held_out))
        yield [pass_point(held_out, variant, rounds=rounds) for variant in variants]
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
    streaming = {
        str(layer): f"{STREAMING.backend} in key heads {', '.join(map(str, numbers))}"
        for layer, numbers in heads.items()
    }
    return plan_point(
        subject,
        _variant(label, heads, subject),
        streaming,
        streaming_heads=sum(map(len, heads.values())),
        key_heads=_kv_heads(subject) * len(subject.layers),
    )


def _retrieved(subject: TextSubject, variant: Variant) -> Point:
    case = case_of(subject, RETRIEVAL, variant)
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


def head_scores(
    model: Any, sites: AttentionSites, texts: Sequence[Tensor], streaming: Choice
) -> dict[int, list[float]]:
    """{layer: score of each key head}, the sum of its shares of the change in text and in copies.

    The change is the norm of the difference that a key head makes in the output of its layer, after the
    projection, over the norm of that output: what the residual stream sees. One forward pass per text, with
    exact outputs; scores are changes over the mean change of all heads, added over text and copies.

    Args:
        texts: Token ids with copies at their end, [1 tokens] each.
        streaming: The window that a key head would read.
    """
    layers, tokens = sites.layers, texts[0].shape[1]
    windows = build_layers(sites, dict.fromkeys(layers, streaming), max_tokens=tokens, seed=0)
    exact = build_layers(sites, dict.fromkeys(layers, EXACT), max_tokens=tokens, seed=0)
    changes: dict[int, Tensor] = {}

    def watch(site: AttentionSite) -> Any:
        def hook(_: nn.Module, args: Any, named: Any, out: Tensor) -> None:
            difference = windows[site.path](*args, **named) - out
            added = _changes(difference, out, args[1].shape[1], _projection(site.module, out))
            changes[site.layer] = changes.get(site.layer, torch.zeros_like(added)) + added

        return exact[site.path].register_forward_hook(hook, with_kwargs=True)

    with installed(model, sites.ordered, exact):
        for site in sites.swapped:
            windows[site.path].to(next(site.module.parameters()).device)
            watch(site)
        for ids in texts:
            forward(model, ids)
    table = torch.stack([changes[layer] for layer in layers])
    scores = (table / table.mean(dim=(0, 1)).clamp_min(torch.finfo(table.dtype).tiny)).sum(dim=-1)
    return {layer: row.tolist() for layer, row in zip(layers, scores, strict=True)}


def _changes(difference: Tensor, out: Tensor, kv_heads: int, projection: Tensor | None) -> Tensor:
    """Changes [kv_heads 2] by key head, in the text and in the copies."""
    begin = copies_begin(out.shape[2])
    columns: list[Any] = [None] * kv_heads
    if projection is not None:
        columns = list(projection.chunk(kv_heads, dim=1))
    changes = torch.zeros(kv_heads, 2, dtype=torch.float64)
    for number, rows in enumerate((slice(begin), slice(begin, None))):
        norm = _projected(out[:, :, rows], projection).norm()
        for head, change in enumerate(difference[:, :, rows].chunk(kv_heads, dim=1)):
            changes[head, number] = _projected(change, columns[head]).norm() / norm
    return changes


def _projected(x: Tensor, weight: Tensor | None) -> Tensor:
    """[batch heads tokens dim] after its columns of the projection; unchanged without a projection."""
    return x if weight is None else x.transpose(1, 2).flatten(2) @ weight.to(x.dtype).T


def _projection(module: nn.Module, out: Tensor) -> Tensor | None:
    """Weight of the projection of the outputs, the last linear layer that takes all heads, if any."""
    width = out.shape[1] * out.shape[3]
    linear = [x for x in module.children() if isinstance(x, nn.Linear) and x.in_features == width]
    return linear[-1].weight.detach() if linear else None
