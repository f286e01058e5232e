"""Steps of an advice without a model: attention alone, on activations of real models."""

import math
from collections.abc import Generator, Sequence
from functools import partial
from statistics import median
from typing import Any

from efficient_attn.measure.accuracy import MEAN
from efficient_attn.measure.inputs import subjects
from efficient_attn.measure.isolation import Measurer
from efficient_attn.measure.record import Case, replace
from efficient_attn.measure.variants import DENSE, UNIFORM_ATTENTION, YARDSTICK, Variant
from efficient_attn.runs.study import Point, Points
from efficient_attn.runs.workload import Costs, Workload
from efficient_attn.stats.predicted_time import time_models
from efficient_attn.studies.advise.record import AdviseRecord
from efficient_attn.studies.mse.points import error_point

# Draws of random features.
DRAWS = 2

# The shipped activations.
SOURCES = ("encoder", "decoder")

# Lengths of the short calls from which longer ones are predicted: a few seconds for all backends.
PROBE = (256, 512, 768, 1024)


def attention_steps(
    models: Sequence[Sequence[Any]],
    variants: Sequence[Variant],
    lengths: Sequence[int],
    workload: Workload,
    *,
    rounds: int,
    measurer: Measurer,
    limit_bytes: int | None,
) -> Points:
    """Measure errors and one round of calls per model, then further rounds and shorter lengths.

    On a busy machine a budget may end within the second model: the first is answered by then.
    """
    calls: list[Point] = []
    for layers in models:
        nearest = _near(variants, (yield from _errors(variants, layers, workload)))
        shared = {**vars(workload), **layers[0].shape, "inputs": "gaussian"}
        costs = Costs(shared=shared, measure=measurer, rounds=rounds, limit_bytes=limit_bytes)
        calls += yield from _call_steps(nearest, lengths, costs)
    yield calls
    # The beginning of a causal sequence is a real sequence.
    for layers in models:
        for tokens in lengths if layers[0].causal else ():
            if tokens < layers[0].tokens:
                yield from _errors(variants, _layers(layers, workload, tokens), workload)


def shipped_layers(workload: Workload) -> list[list[Any]]:
    """q, k and v of the layers of each shipped model."""
    return [_layers(subjects([name], seed=workload.seed), workload) for name in SOURCES]


def _layers(layers: Sequence[Any], workload: Workload, tokens: int | None = None) -> list[Any]:
    """q, k and v of layers, in the dtype and on the device of the workload."""
    return [layer.converted(tokens=tokens, dtype=workload.dtype, device=workload.device) for layer in layers]


def _errors(
    variants: Sequence[Variant], layers: Sequence[Any], workload: Workload
) -> Generator[Point | list[Point], Any, dict[str, float]]:
    """Yield errors on all layers, and return medians by label, infinite after a failure."""
    medians = {}
    for variant in (variants[0], MEAN, *variants[1:]):
        errors: list[float] = []
        for layer in layers:
            record = yield error_point(variant, layer, draws=DRAWS, threads=workload.threads or 1)
            if record.status != "ok":
                break
            errors.append(math.nan if record.output_relative_error is None else record.output_relative_error)
        medians[variant.label] = median(errors) if len(errors) == len(layers) else math.inf
    return medians


def _near(variants: Sequence[Variant], errors: dict[str, float]) -> list[Variant]:
    """Exact attention, then backends not known to err as uniform attention, the nearest first."""
    exact, *others = variants
    near = [x for x in others if not errors[UNIFORM_ATTENTION] <= errors[x.label]]
    return [exact, *sorted(near, key=lambda variant: errors[variant.label])]


def _call_steps(
    variants: Sequence[Variant], lengths: Sequence[int], costs: Costs
) -> Generator[Point | list[Point], Any, list[Point]]:
    """Yield short calls, predictions and long calls that may be faster, and return all calls."""
    short = sorted({*PROBE, *(length for length in lengths if length <= PROBE[-1])})
    calls = [costs.point(variant, tokens) for tokens in short for variant in variants]
    records = yield [replace(call, rounds=1) for call in calls]
    models = time_models(records, {variant.label: variant.target for variant in variants})
    exact = models.pop(YARDSTICK, None)
    long: list[Point] = []
    for tokens in lengths:
        for variant in variants if tokens > PROBE[-1] else ():
            call, slower = costs.point(variant, tokens), False
            if exact is not None and variant.label in models:
                # A resumed run decides by the stored prediction, whatever rounds came after it.
                speed = models[variant.label].speed(exact, tokens=tokens)
                high = (yield _prediction(call.case, *speed)).predicted_speed_high
                slower = high is not None and high < 1
            if variant.backend == YARDSTICK or not (slower or variant.backend == DENSE):
                long.append(call)
    yield [replace(call, rounds=1) for call in long]
    return [*calls, *long]


def _prediction(timed: Case, value: float | None, low: float | None, high: float | None) -> Point:
    case = replace(timed, kind="prediction")
    speed: Any = {"predicted_speed": value, "predicted_speed_low": low, "predicted_speed_high": high}
    return Point(case=case, measure=partial(AdviseRecord, case=case, **speed), series="prediction", cost=0.0)
