"""Steps of an advice for a decoder: heads with a sliding window, ranked, bisected and verified."""

import itertools
import json
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from efficient_attn.backends.by_head import NAME as BY_HEAD
from efficient_attn.integrations.transformers import swapping
from efficient_attn.integrations.transformers.assignment import EXACT
from efficient_attn.integrations.transformers.attachment import installed
from efficient_attn.integrations.transformers.sites import AttentionSite
from efficient_attn.measure.calls import answer
from efficient_attn.measure.copies import PROMPTS
from efficient_attn.measure.record import Case
from efficient_attn.measure.variants import OWN, PLAN, Variant
from efficient_attn.registry import Choice
from efficient_attn.runs.study import Point, Points
from efficient_attn.studies.advise.names import HEADS, RANDOM_HEADS, RETRIEVAL
from efficient_attn.studies.advise.precision import Timed, timing_steps
from efficient_attn.studies.advise.record import AdviseRecord, Targets
from efficient_attn.studies.swap.measure import ModelSubject, case_of, plan_point, work
from efficient_attn.studies.swap.model import TextSubject
from efficient_attn.studies.swap.names import OWN_ATTENTION, WINDOW

# Windows of a head, the smallest first: the larger one is tried where fewer than a third of the heads fit.
STREAMING = tuple(Choice(WINDOW, {"window": window, "global_tokens": 4}) for window in (512, 1024))

# Plans that the bisection tries: the count is known to a 32nd of all heads then.
_TRIALS = 5


class HeadPlan(NamedTuple):
    """Layer and number of key/value heads with a sliding window, and the window."""

    heads: Sequence[tuple[int, int]]
    choice: Choice

    @property
    def by_layer(self) -> dict[int, list[int]]:
        layers = sorted({layer for layer, _ in self.heads})
        return {layer: sorted(head for place, head in self.heads if place == layer) for layer in layers}

    def saving(self, tokens: int) -> float:
        """Number of windowed heads, times the share of the keys of a sequence that they do not read."""
        return len(self.heads) * max(1 - sum(self.choice.options.values()) / tokens, 0.0) ** 2


def head_steps(
    choosing: TextSubject, held_out: TextSubject, targets: Targets, timed: Sequence[Timed], rounds: int | None
) -> Points:
    """Rank the key/value heads, window as many as the targets allow, and verify on held-out texts."""
    heads = [(layer, head) for layer in choosing.layers for head in range(_kv_heads(choosing))]
    labels = (f"{PLAN} {number}" for number in itertools.count(1))
    plans: list[HeadPlan] = []
    for choice in STREAMING:
        plan = yield from _counted(choosing, targets, choice, labels)
        if plan is None:
            break
        plans.append(plan)
        if 3 * len(plan.heads) >= len(heads):
            break
    if not plans:
        return
    plan = max(plans, key=lambda plan: plan.saving(choosing.shared["tokens"]))
    yield _planned(held_out, PLAN, plan)
    if plan.heads:
        variant = _variant(PLAN, plan, held_out)
        yield from timing_steps(timed, (held_out, variant), rounds)
        # As many heads, drawn by chance: what the rank is worth.
        drawn = random.Random(choosing.shared["seed"]).sample(heads, len(plan.heads))
        yield _planned(held_out, RANDOM_HEADS, plan._replace(heads=drawn))
        case = case_of(held_out, RETRIEVAL, variant)
        yield Point(
            case=case,
            measure=partial(answer, case, partial(_retrieval, case, variant, held_out)),
            label=f"{variant.label}, {case.tokens} tokens, numbers in a text",
            series=RETRIEVAL,
            # One pass of the plan and one of the model for each prompt.
            cost=2.0 * PROMPTS * work(case),
        )


def _counted(
    subject: TextSubject, targets: Targets, choice: Choice, labels: Iterator[str]
) -> Generator[Point | list[Point], Any, HeadPlan | None]:
    """Rank the heads and bisect the number that may use a window, or None if a point failed."""
    loaded = subject.loaded or subject
    case = case_of(loaded, HEADS, replace(OWN_ATTENTION, options=choice.options))
    call = partial(answer, case, partial(_scored, case, loaded, choice))
    # A backward pass took twice as long as a forward pass.
    record = yield Point(case=case, measure=call, series=OWN, cost=3.0 * work(case))
    if record.status != "ok":
        return None
    # In their order before scores are measured.
    heads = [(layer, head, 0.0) for layer in subject.layers for head in range(_kv_heads(subject))]
    scored = json.loads(record.head_scores) if record.head_scores else heads
    ranked = [(layer, head) for layer, head, _ in sorted(scored, key=lambda row: row[2])]
    fewest, most = 0, len(ranked)
    for number in range(_TRIALS):
        count = max(len(ranked) // 3, 1) if number == 0 else (fewest + most) // 2
        if count in (fewest, most):
            break
        record = yield _planned(subject, next(labels), HeadPlan(ranked[:count], choice))
        if record.status == "skipped":
            # The budget leaves the count that is known.
            break
        if record.status != "ok":
            return None
        fewest, most = (fewest, count) if targets.halved().missed(record) else (count, most)
    return HeadPlan(ranked[:fewest], choice)


def _kv_heads(subject: ModelSubject) -> int:
    return int(subject.shared["num_kv_heads"] or subject.shared["num_heads"])


def _scored(case: Case, subject: TextSubject, choice: Choice) -> AdviseRecord:
    scores = head_scores(subject.model, subject.sites, subject.texts, choice)
    rows = [(layer, head, value) for layer, row in scores.items() for head, value in enumerate(row)]
    return AdviseRecord(case=case, head_scores=json.dumps(rows))


def _variant(label: str, plan: HeadPlan, subject: TextSubject) -> Variant:
    target = {}
    for layer, numbers in plan.by_layer.items():
        # With attention in bfloat16, windows multiply in it too.
        rest = subject.base.get(layer, EXACT)
        window = Choice(WINDOW, {**plan.choice.options, **rest.options})
        part = {"heads": {",".join(map(str, numbers)): tuple(window)}, "rest": tuple(rest)}
        target[layer] = window if len(numbers) == _kv_heads(subject) else Choice(BY_HEAD, part)
    options = {"layers": json.dumps(plan.by_layer), "window": plan.choice.options["window"]}
    return Variant(backend=PLAN, label=label, target=target, options=options)


def _planned(subject: TextSubject, label: str, plan: HeadPlan) -> Point:
    """Point of the loss and recall of a plan, or of the decision for no heads."""
    streaming = {str(layer): f"window in key/value heads {heads}" for layer, heads in plan.by_layer.items()}
    return plan_point(
        subject,
        _variant(label, plan, subject),
        streaming,
        streaming_heads=len(plan.heads),
        key_heads=_kv_heads(subject) * len(subject.layers),
    )


def _retrieval(case: Case, variant: Variant, subject: TextSubject) -> AdviseRecord:
    """Share of planted numbers that the plan finds, beside the model with its own attention."""
    exact = (subject.loaded or subject).right_answers()
    with subject.replaced(variant):
        answers = subject.right_answers()
    differences = [float(a) - float(b) for a, b in zip(answers, exact, strict=True)]
    return AdviseRecord(
        case=case,
        retrieval=fmean(answers),
        retrieval_exact=fmean(exact),
        retrieval_error=stdev(differences) / len(differences) ** 0.5,
        numbers=len(exact),
    )


def head_scores(
    model: Any, sites: swapping.AttentionSites, texts: Sequence[Tensor], streaming: Choice
) -> dict[int, list[float]]:
    """{layer: score of each key/value head}, Σ_t (∂L/∂o_t · Δo_t)², by one backward pass per text.

    L is the mean loss of the next token in text and copies, o_t the output of a key/value head (all its query
    heads) at token t before the projection, and Δo_t its change. The sum is the empirical Fisher information
    of the change.
    """
    tokens = texts[0].shape[1]
    windows, exact = (
        swapping.build_layers(sites, dict.fromkeys(sites.layers, choice), max_tokens=tokens, seed=0)
        for choice in (streaming, EXACT)
    )
    scores: dict[int, Tensor] = {}

    def compare(site: AttentionSite, _: nn.Module, args: Any, named: Any, out: Tensor) -> None:
        # The first pass of a block that is recomputed has no gradients.
        if out.requires_grad:
            with torch.no_grad():
                difference = windows[site.path](*args, **named) - out
            out.register_hook(partial(add, site.layer, args[1].shape[1], difference))

    def add(layer: int, kv_heads: int, difference: Tensor, gradient: Tensor) -> None:
        products = (gradient.double() * difference).unflatten(1, (kv_heads, -1)).sum(dim=(2, 4))
        # The backward pass is that of the summed loss.
        added = (products / (difference.shape[2] - 1)).square().sum(dim=(0, 2))
        scores[layer] = scores.get(layer, torch.zeros_like(added)) + added

    with installed(model, sites.ordered, exact), _recomputed(model, sites):
        for site in sites.swapped:
            windows[site.path].to(next(site.module.parameters()).device)
            exact[site.path].register_forward_hook(partial(compare, site), with_kwargs=True)
        for ids in texts:
            swapping.backpropagate_loss(model, ids)
    return {layer: scores[layer].tolist() for layer in sites.layers}


@contextmanager
def _recomputed(model: Any, sites: swapping.AttentionSites) -> Iterator[None]:
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
            stack.enter_context(swapping.replaced_forward(block, partial(recomputed, block.forward)))
        embeddings = model.get_input_embeddings()
        hook = embeddings.register_forward_hook(lambda module, args, out: out.requires_grad_())
        stack.callback(hook.remove)
        yield
