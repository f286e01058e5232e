"""Steps of an advice for a decoder: key heads that stream, ranked, counted by bisection and verified."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from efficient_attn.backends.by_head import NAME as BY_HEAD
from efficient_attn.integrations.transformers.assignment import EXACT, Choice
from efficient_attn.integrations.transformers.attachment import installed
from efficient_attn.integrations.transformers.sites import AttentionSite
from efficient_attn.integrations.transformers.swapping import (
    AttentionSites,
    backpropagate_loss,
    build_layers,
    replaced_forward,
)
from efficient_attn.measure.planted_numbers import PROMPTS
from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.variants import OWN, PLAN, Variant
from efficient_attn.measure.worker import answer
from efficient_attn.studies.advise.outcomes import Targets
from efficient_attn.studies.advise.plan import HEADS, RANDOM_HEADS, RETRIEVAL
from efficient_attn.studies.study import Point, Steps
from efficient_attn.studies.swap.measure import OWN_ATTENTION, WINDOW, case_of, pass_point, plan_point
from efficient_attn.studies.swap.model import TextSubject

# What a streaming head reads.
STREAMING = Choice(WINDOW, {"window": 512, "global_tokens": 4})

# Score by which key heads are ranked, in the words of the verdict.
SCORE = "second-order score"

# Plans that the bisection tries: the count is known to a 32nd of all heads then.
_TRIALS = 5

# Time of the score over that of a forward pass: 2.9 was measured.
_SCORE_COST = 3.0

# Layer and number of key heads.
Heads = Sequence[tuple[int, int]]


def head_steps(choosing: TextSubject, held_out: TextSubject, targets: Targets, *, rounds: int) -> Steps:
    """Rank the key heads, let as many stream as the targets allow, and verify on held-out texts."""
    record = yield _rank_point(choosing)
    if record.status != "ok":
        return
    ranked = _ranked(record, choosing)
    fewest, most = 0, len(ranked)
    for number in range(1, _TRIALS + 1):
        count = max(len(ranked) // 3, 1) if number == 1 else (fewest + most) // 2
        if count in (fewest, most):
            break
        record = yield _planned(choosing, f"{PLAN} {number}", ranked[:count])
        if record.status != "ok":
            return
        fewest, most = (fewest, count) if targets.halved().missed(record) else (count, most)
    vars(choosing).pop("exact", None)
    heads = ranked[:fewest]
    yield _planned(held_out, PLAN, heads)
    if heads:
        # As many heads, drawn by chance: what the rank is worth.
        drawn = random.Random(choosing.shared["seed"]).sample(ranked, len(heads))
        yield _planned(held_out, RANDOM_HEADS, sorted(drawn))
        variants = (OWN_ATTENTION, _variant(PLAN, heads, held_out))
        yield [pass_point(held_out, variant, rounds=rounds) for variant in variants]
        yield _retrieved(held_out, variants[1])
    vars(held_out).pop("exact", None)


def _rank_point(subject: TextSubject) -> Point:
    options = {"score": SCORE, **STREAMING.options}
    case = case_of(subject, HEADS, replace(OWN_ATTENTION, options=options))
    return Point(
        case=case,
        measure=partial(answer, case, partial(_scored, case, subject)),
        label=f"{SCORE} of the key heads, {case.tokens} tokens",
        series=OWN,
        cost=_SCORE_COST * case.tokens,
    )


def _ranked(record: Record, subject: TextSubject) -> Heads:
    """The key heads, the least needed first; in their order where the scores are still to be measured."""
    if record.head_scores is None:
        return [(layer, head) for layer in subject.layers for head in range(_kv_heads(subject))]
    scores = sorted(json.loads(record.head_scores), key=lambda row: row[2])
    return [(layer, head) for layer, head, _ in scores]


def _kv_heads(subject: TextSubject) -> int:
    """Key heads of a layer."""
    return int(subject.shared["num_kv_heads"] or subject.shared["num_heads"])


def _scored(case: Case, subject: TextSubject) -> Record:
    scores = second_order_scores(subject.model, subject.sites, subject.texts, STREAMING)
    rows = [(layer, head, value) for layer, row in scores.items() for head, value in enumerate(row)]
    return Record(case=case, head_scores=json.dumps(rows), ranked_by=SCORE)


def _by_layer(heads: Heads) -> dict[int, list[int]]:
    """Numbers of the heads by layer."""
    layers = sorted({layer for layer, _ in heads})
    return {layer: sorted(head for place, head in heads if place == layer) for layer in layers}


def _variant(label: str, heads: Heads, subject: TextSubject) -> Variant:
    """The plan as one variant; its options tell plans apart."""
    target = {}
    for layer, numbers in _by_layer(heads).items():
        part = {"heads": {",".join(map(str, numbers)): tuple(STREAMING)}}
        target[layer] = STREAMING if len(numbers) == _kv_heads(subject) else Choice(BY_HEAD, part)
    options = {"layers": json.dumps(_by_layer(heads)), "window": STREAMING.options["window"]}
    return Variant(backend=PLAN, label=label, target=target, options=options)


def _planned(subject: TextSubject, label: str, heads: Heads) -> Point:
    """Loss and recall of a plan; without heads the record is the decision for none."""
    streaming = {
        str(layer): f"{WINDOW} in key heads {', '.join(map(str, numbers))}"
        for layer, numbers in _by_layer(heads).items()
    }
    return plan_point(
        subject,
        _variant(label, heads, subject),
        streaming,
        streaming_heads=len(heads),
        key_heads=_kv_heads(subject) * len(subject.layers),
        ranked_by=SCORE,
    )


def _retrieved(subject: TextSubject, variant: Variant) -> Point:
    case = case_of(subject, RETRIEVAL, variant)
    return Point(
        case=case,
        measure=partial(answer, case, partial(_retrieval, case, variant, subject)),
        label=f"{variant.label}, {case.tokens} tokens, numbers in a text",
        series=RETRIEVAL,
        # One pass of the plan and one of the model for each prompt.
        cost=2.0 * PROMPTS * case.tokens,
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


def second_order_scores(
    model: Any, sites: AttentionSites, texts: Sequence[Tensor], streaming: Choice
) -> dict[int, list[float]]:
    """{layer: score of each key head}, Σ_t (∂L/∂o_t · Δo_t)², by one backward pass per text.

    L is the mean loss of the next token in text and copies, o_t the output of a key head (of all its query
    heads) at token t before the projection, and Δo_t its change. The sum is the empirical Fisher information
    of the change.

    Args:
        texts: Token ids with copies at their end, [1 tokens] each.
        streaming: The window that a key head would read.
    """
    scores: dict[int, Tensor] = {}
    windows, exact = (
        build_layers(sites, dict.fromkeys(sites.layers, choice), max_tokens=texts[0].shape[1], seed=0)
        for choice in (streaming, EXACT)
    )

    def compare(site: AttentionSite, _: nn.Module, args: Any, named: Any, out: Tensor) -> None:
        # The first pass of a block that is recomputed has no gradients.
        if not out.requires_grad:
            return
        with torch.no_grad():
            difference = windows[site.path](*args, **named) - out
        kv_heads, tokens = args[1].shape[1], out.shape[2]

        def add(gradient: Tensor) -> None:
            products = (gradient.double() * difference).unflatten(1, (kv_heads, -1)).sum(dim=(2, 4))
            # The backward pass is that of the summed loss.
            added = (products / (tokens - 1)).square().sum(dim=(0, 2))
            scores[site.layer] = scores.get(site.layer, torch.zeros_like(added)) + added

        out.register_hook(add)

    with installed(model, sites.ordered, exact), _recomputed(model, sites):
        for site in sites.swapped:
            windows[site.path].to(next(site.module.parameters()).device)
            exact[site.path].register_forward_hook(partial(compare, site), with_kwargs=True)
        for ids in texts:
            backpropagate_loss(model, ids)
    return {layer: scores[layer].tolist() for layer in sites.layers}


@contextmanager
def _recomputed(model: Any, sites: AttentionSites) -> Iterator[None]:
    """The model with gradients of activations alone, of which a backward pass holds one block at a time."""

    def recomputed(forward: Callable[..., Any], hidden: Tensor, *args: Any, **named: Any) -> Any:
        call = partial(forward, **named)
        return checkpoint(call, hidden, *args, use_reentrant=True, preserve_rng_state=False)

    with ExitStack() as stack:
        for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
            stack.callback(parameter.requires_grad_)
            parameter.requires_grad_(False)
        for path in {site.path.rpartition(".")[0] for site in sites.ordered}:
            block = model.get_submodule(path)
            stack.enter_context(replaced_forward(block, partial(recomputed, block.forward)))
        embeddings = model.get_input_embeddings()
        hook = embeddings.register_forward_hook(lambda module, args, out: out.requires_grad_())
        stack.callback(hook.remove)
        yield
