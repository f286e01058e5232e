"""Steps of an advice for a model: the bound, losses, a plan of layers and its verification."""

import itertools
import json
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from efficient_attn.measure import worker
from efficient_attn.measure.variants import DENSE, PLAN, UNIFORM_ATTENTION, YARDSTICK, Variant
from efficient_attn.runs.study import Point, Points
from efficient_attn.runs.workload import Costs
from efficient_attn.stats.estimates import call_time, time_ratio
from efficient_attn.stats.predicted_time import predicted_slower
from efficient_attn.studies.advise.names import BOUND, LOSSLESS, SLIDING
from efficient_attn.studies.advise.record import AdviseRecord
from efficient_attn.studies.swap.measure import (
    OWN_ATTENTION,
    distance_point,
    has_copies,
    pass_point,
    plan_point,
)
from efficient_attn.studies.swap.names import WINDOW
from efficient_attn.studies.swap.subject import ModelSubject

# Length of the longest short call, of which parts predict longer calls: a few seconds for all backends.
PROBE = 1024

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
    *,
    quantity: str,
    limit: float,
    rounds: int,
    heads: Callable[[Any, Any], Points] | None = None,
) -> Points:
    """Rank the `heads` of a decoder, or measure all points of each length."""
    if heads is not None:
        for choosing, held_out in filter(lambda pair: has_copies(pair[0]), pairs):
            # Errors need no quiet machine: one round bounds the gain, and the plan is timed last.
            if not (yield from _bound_excludes(choosing, [OWN_ATTENTION], variants, rounds=1)):
                yield from heads(choosing, held_out)
        pairs = [pair for pair in pairs if not has_copies(pair[0])]
    if not pairs:
        return
    longest = max(choosing.shared["tokens"] for choosing, _ in pairs)
    probes = _probes(pairs[0][0], variants, min(PROBE, longest), rounds)
    short: list[AdviseRecord] = []
    for pair in pairs:
        yield from _length_steps(pair, variants, probes, short, quantity, limit, rounds)


def _probes(subject: ModelSubject, variants: Sequence[Variant], longest: int, rounds: int) -> list[Point]:
    """Short calls of all backends at a quarter, a half, three quarters and all of a length."""
    shared = {key: value for key, value in subject.shared.items() if key not in ("tokens", "inputs")}
    costs = Costs(shared={**shared, "inputs": "gaussian"}, measure=worker.measure, rounds=rounds)
    called = [variant for variant in variants if variant.backend != UNIFORM_ATTENTION]
    lengths = sorted({longest * part // 4 for part in range(1, 5)} - {0})
    return [costs.point(variant, tokens) for tokens in lengths for variant in called]


def _lossless_windows(
    subject: ModelSubject, quantity: str
) -> Generator[Point | list[Point], Any, dict[int, str]]:
    """Assign windows to sliding layers, unless these change the outputs."""
    if not subject.sliding:
        return {}
    loss = getattr((yield distance_point(subject, _LOSSLESS)), quantity)
    epsilon = torch.finfo(getattr(torch, subject.shared["dtype"])).eps
    changed = loss is not None and not loss <= max(_ROUNDING, (_EPSILONS * epsilon) ** 2)
    return {} if changed else dict.fromkeys(subject.sliding, SLIDING)


def _free(subject: ModelSubject) -> list[int]:
    """Layers without a sliding window, which may get a backend."""
    return [layer for layer in subject.layers if layer not in subject.sliding]


def _bound_excludes(
    subject: ModelSubject, references: Sequence[Variant], variants: Sequence[Variant], rounds: int
) -> Generator[Point | list[Point], Any, bool]:
    """Time the references and uniform attention, and tell whether no attention is clearly faster."""
    mean = next(variant for variant in variants if variant.backend == UNIFORM_ATTENTION)
    bounded = bool(_free(subject)) and (yield distance_point(subject, mean)).status == "ok"
    timed = [*references, mean] if bounded else [*references]
    if len(timed) == 1:
        return False
    times = yield [pass_point(subject, variant, BOUND, rounds=rounds) for variant in timed]
    reference, bound = times[len(references) - 1], times[-1]
    if not (bounded and reference.times_s and bound.times_s):
        return False
    ratio = time_ratio(bound, reference)
    return ratio.median <= 1 if ratio.low is None else ratio.side_of_one < 1


def _length_steps(
    pair: tuple[ModelSubject, ModelSubject],
    variants: Sequence[Variant],
    probes: Sequence[Point],
    short: list[AdviseRecord],
    quantity: str,
    limit: float,
    rounds: int,
) -> Points:
    """Windows in sliding layers, the bound, all layers, single layers, plans, verification.

    Args:
        short: Records of the probes, which are measured at the first length that the bound does not exclude.
    """

    def loss_of(record: AdviseRecord) -> float:
        loss = getattr(record, quantity) if record.status == "ok" else None
        return math.inf if loss is None or math.isnan(loss) else float(loss)

    choosing, held_out = pair
    windows = yield from _lossless_windows(choosing, quantity)
    if choosing.sliding and not windows:
        choosing, held_out = (replace(cast(Any, part), base={}) for part in (choosing, held_out))
    references = [OWN_ATTENTION, _LOSSLESS] if windows else [OWN_ATTENTION]
    excluded = yield from _bound_excludes(choosing, references, variants, rounds)
    free = [] if excluded else _free(choosing)
    if free and probes and not short:
        short += yield [*probes]
    growth = {variant.label: variant.time_growth for variant in variants}
    slower = predicted_slower(short, growth, choosing.shared["tokens"])
    variants = [variant for variant in variants if variant.label not in slower]

    losses_of_all: dict[str, float] = {}
    statuses: set[str] = set()
    for variant in variants if free else ():
        if variant.backend != UNIFORM_ATTENTION:
            record = yield distance_point(choosing, variant)
            statuses.add(record.status)
            if record.status == "ok":
                losses_of_all[variant.label] = loss_of(record)
    working = [variant for variant in variants if variant.label in losses_of_all]
    gains_s: dict[str, float] = {}
    if working:
        times = yield [pass_point(choosing, variant, rounds=rounds) for variant in (*references, *working)]
        statuses |= {record.status for record in times}
        reference, *times = times[len(references) - 1 :]
        gains_s = _gains_s(reference, list(zip(working, times, strict=True)), len(free))
    losses: dict[int, dict[str, float]] = {layer: {} for layer in free}
    for variant, layer in itertools.product(working, free):
        if variant.label in gains_s:
            record = yield distance_point(choosing, variant, layer)
            statuses.add(record.status)
            losses[layer][variant.label] = loss_of(record)
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
    # Exact outputs of one set of texts are kept at a time.
    vars(choosing).pop("exact", None)
    yield _planned(held_out, PLAN, plan, working)
    if plan:
        both = (OWN_ATTENTION, _plan_variant(PLAN, plan, working))
        yield [pass_point(held_out, variant, rounds=rounds) for variant in both]
    vars(held_out).pop("exact", None)


def _gains_s(
    reference: AdviseRecord, times: Sequence[tuple[Variant, AdviseRecord]], num_layers: int
) -> dict[str, float]:
    """Seconds that one replaced layer gains by label, of backends that are not clearly slower."""
    gains_s = {}
    for variant, record in times:
        if variant.backend in _BASELINES or record.status != "ok":
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
    """The backends of the layers as one variant, identified by its option."""
    by_label = {variant.label: variant for variant in variants}
    target = {
        layer: (by_label[name].target, by_label[name].options) if name in by_label else (WINDOW, {})
        for layer, name in layers.items()
    }
    return Variant(backend=PLAN, label=label, target=target, options={"layers": json.dumps(layers)})


def _planned(
    subject: ModelSubject, label: str, layers: Mapping[int, str], variants: Sequence[Variant]
) -> Point:
    return plan_point(subject, _plan_variant(label, layers, variants), layers)
