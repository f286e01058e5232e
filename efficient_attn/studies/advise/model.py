"""Steps of an advice for a model: the bound, losses, a plan of layers and its verification."""

import itertools
import json
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from efficient_attn.measure.clock import LOOKS
from efficient_attn.measure.variants import DENSE, PLAN, UNIFORM_ATTENTION, YARDSTICK, Variant
from efficient_attn.runs.study import Point, Points
from efficient_attn.stats.estimates import call_time, time_ratio
from efficient_attn.studies.advise.heads import head_steps
from efficient_attn.studies.advise.names import BOUND, LOSSLESS, SLIDING
from efficient_attn.studies.advise.outcomes import excludes
from efficient_attn.studies.advise.precision import Timed, precision_steps, timing_steps
from efficient_attn.studies.advise.record import AdviseRecord, Targets
from efficient_attn.studies.swap import measure
from efficient_attn.studies.swap.measure import ModelSubject
from efficient_attn.studies.swap.names import WINDOW

# Backends that are tried in single layers: the nearest in all layers together.
_CANDIDATES = 6

# Shares of the limit that the summed losses of a plan may reach: a later one where an earlier plan misses it.
ATTEMPTS = (1.0, 0.5, 0.25)

# Losses below this are rounding of float32 in another kernel; of other dtypes below the square of 4 epsilons.
_ROUNDING, _EPSILONS = 1e-8, 4

# Sliding layers are windows of the width of the model, in every plan.
_LOSSLESS = Variant(backend=WINDOW, label=LOSSLESS, target={})

# Backends that stand in no plan.
_BASELINES = (YARDSTICK, DENSE, UNIFORM_ATTENTION)


def model_steps(
    pairs: Sequence[tuple[ModelSubject, ModelSubject]],
    variants: Sequence[Variant],
    targets: Targets,
    *,
    rounds: int | None,
    ranks_heads: bool,
) -> Points:
    """Precision, then the bound, then per length a plan of heads where `ranks_heads`, or of layers."""
    first = LOOKS[0] if rounds is None else rounds
    for pair in pairs:
        choosing, held_out, timed = yield from precision_steps(*pair, targets)
        if ranks_heads and measure.has_copies(choosing):
            # Errors need no quiet machine: one round bounds the gain, and the plan is timed last.
            references = [choosing.original]
            if not (yield from _bound_excludes(choosing, references, variants, rounds=1)):
                yield from head_steps(choosing, held_out, targets, timed, rounds)
        else:
            yield from _length_steps(choosing, held_out, variants, targets, timed, rounds)
        if len(timed) > 1:
            yield [measure.pass_point(*each, rounds=first) for each in timed]


def _lossless_windows(
    subject: ModelSubject, quantity: str
) -> Generator[Point | list[Point], Any, dict[int, str]]:
    """Assign windows to sliding layers, unless these change the outputs."""
    if not subject.sliding:
        return {}
    loss = getattr((yield measure.distance_point(subject, _LOSSLESS)), quantity)
    epsilon = torch.finfo(getattr(torch, subject.shared["dtype"])).eps
    changed = loss is not None and not loss <= max(_ROUNDING, (_EPSILONS * epsilon) ** 2)
    return {} if changed else dict.fromkeys(subject.sliding, SLIDING)


def _free(subject: ModelSubject) -> list[int]:
    """Layers without a sliding window, which may get a backend."""
    return [layer for layer in subject.layers if layer not in subject.sliding]


def _bound_excludes(
    subject: ModelSubject, references: Sequence[Variant], variants: Sequence[Variant], rounds: int
) -> Generator[Point | list[Point], Any, bool]:
    """Time the references and uniform attention, and return whether all attention could gain too little."""
    mean = next(variant for variant in variants if variant.backend == UNIFORM_ATTENTION)
    bounded = bool(_free(subject)) and (yield measure.distance_point(subject, mean)).status == "ok"
    timed = [*references, mean] if bounded else [*references]
    if len(timed) == 1:
        return False
    times = yield [measure.pass_point(subject, variant, BOUND, rounds=rounds) for variant in timed]
    reference, bound = times[len(references) - 1], times[-1]
    return bool(bounded and reference.times_s and bound.times_s) and excludes(time_ratio(bound, reference))


def _length_steps(
    choosing: ModelSubject,
    held_out: ModelSubject,
    variants: Sequence[Variant],
    targets: Targets,
    timed: Sequence[Timed],
    rounds: int | None,
) -> Points:
    """Windows in sliding layers, the bound, errors of layers, times, plans, verification."""
    quantity, limit, first = targets.quantity, targets.limit, LOOKS[0] if rounds is None else rounds

    def loss_of(record: AdviseRecord) -> float:
        loss = getattr(record, quantity) if record.status == "ok" else None
        return math.inf if loss is None or math.isnan(loss) else float(loss)

    windows = yield from _lossless_windows(choosing, quantity)
    if choosing.sliding and not windows:
        choosing, held_out = (replace(cast(Any, part), base={}) for part in (choosing, held_out))
    references = [choosing.original, _LOSSLESS] if windows else [choosing.original]
    excluded = yield from _bound_excludes(choosing, references, variants, first)
    free = [] if excluded else _free(choosing)

    losses_of_all: dict[str, float] = {}
    statuses: set[str] = set()
    for variant in variants if free else ():
        record = yield measure.distance_point(choosing, variant)
        statuses.add(record.status)
        if record.status == "ok":
            losses_of_all[variant.label] = loss_of(record)
    candidates = [x for x in variants if x.label in losses_of_all and x.backend not in _BASELINES]
    working = sorted(candidates, key=lambda variant: losses_of_all[variant.label])[:_CANDIDATES]
    losses: dict[int, dict[str, float]] = {layer: {} for layer in free}
    for variant, layer in itertools.product(working, free):
        record = yield measure.distance_point(choosing, variant, layer)
        statuses.add(record.status)
        losses[layer][variant.label] = loss_of(record)
    # Only backends with a layer within the limit are timed.
    working = [x for x in working if best_layers(losses, losses_of_all, {x.label: 1.0}, limit)]
    gains_s: dict[str, float] = {}
    if working:
        times = yield [measure.pass_point(choosing, x, rounds=first) for x in (*references, *working)]
        statuses |= {record.status for record in times}
        reference, *times = times[len(references) - 1 :]
        gains_s = _gains_s(reference, list(zip(working, times, strict=True)), len(free))
    gains_s = {label: gain_s for label, gain_s in gains_s.items() if gain_s > 0}

    chosen: Mapping[int, str] = {}
    for number, share in enumerate(ATTEMPTS, start=1):
        layers = best_layers(losses, losses_of_all, gains_s, share * limit)
        if not layers:
            break
        record = yield _planned(choosing, f"{PLAN} {number}", {**windows, **layers}, working)
        if record.status != "ok":
            return
        if loss_of(record) <= limit:
            chosen = layers
            break
    plan = {**windows, **chosen}
    if ("skipped" in statuses and not chosen) or not (plan or free):
        # The budget left out a possible plan, or the bound excludes all of them.
        return
    yield _planned(held_out, PLAN, plan, working)
    if plan:
        yield from timing_steps(timed, (held_out, _plan_variant(PLAN, plan, working)), rounds)


def _gains_s(
    reference: AdviseRecord, times: Sequence[tuple[Variant, AdviseRecord]], num_layers: int
) -> dict[str, float]:
    """Seconds that one replaced layer gains by label, of backends that are not clearly slower."""
    gains_s = {}
    for variant, record in times:
        if record.status != "ok":
            continue
        if not (reference.times_s and record.times_s):
            # Times of points to come are not known yet.
            gains_s[variant.label] = 0.0
        elif time_ratio(record, reference).side_of_one >= 0:
            gain_s = call_time(reference).median - call_time(record).median
            gains_s[variant.label] = gain_s / num_layers
    return gains_s


def best_layers(
    losses: Mapping[int, Mapping[str, float]],
    losses_of_all: Mapping[str, float],
    gains_s: Mapping[str, float],
    limit: float,
) -> dict[int, str]:
    """{layer: label} of the largest gain: one backend in all layers, or in those that lose least.

    Losses of single layers are added as if the errors that two layers make were independent and small: a
    first guess, which the run checks with all chosen layers replaced together.
    """
    plans = [dict.fromkeys(losses, label) for label in gains_s if losses_of_all[label] <= limit]
    for label in gains_s:
        layers = sorted(losses, key=lambda layer: losses[layer][label])
        sums = itertools.accumulate(losses[layer][label] for layer in layers)
        plans.append({layer: label for layer, total in zip(layers, sums, strict=True) if total <= limit})
    return max(plans, key=lambda plan: sum(gains_s[label] for label in plan.values()), default={})


def _plan_variant(label: str, layers: Mapping[int, str], variants: Sequence[Variant]) -> Variant:
    by_label = {variant.label: variant for variant in variants}
    target = {
        layer: (by_label[name].target, by_label[name].options) if name in by_label else (WINDOW, {})
        for layer, name in layers.items()
    }
    return Variant(backend=PLAN, label=label, target=target, options={"layers": json.dumps(layers)})


def _planned(
    subject: ModelSubject, label: str, layers: Mapping[int, str], variants: Sequence[Variant]
) -> Point:
    return measure.plan_point(subject, _plan_variant(label, layers, variants), layers)
