"""Steps of an advice without a model: attention alone, on activations of real models."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from efficient_attn.measure.isolation import Measurer
from efficient_attn.measure.record import Case, Record, replace
from efficient_attn.measure.variants import DENSE, MEAN_OF_VALUES, YARDSTICK, Variant
from efficient_attn.stats.predicted_time import Predicted, time_models
from efficient_attn.studies.advise.errors import error_points
from efficient_attn.studies.advise.shapes import PROBE
from efficient_attn.studies.costs import Costs, shape_of_subject
from efficient_attn.studies.points import Point, Steps
from efficient_attn.studies.workload import Workload

# The shipped activations.
SOURCES = ("encoder", "decoder")


@dataclass
class Source:
    """One shipped model, and what was measured on it so far.

    Attributes:
        layers: q, k, v of each layer.
        errors: Median error over the layers at the real length, by label; infinite where it failed, NaN where
            it is not known yet.
        short: Times of short calls.
    """

    layers: Sequence[Any]
    variants: Sequence[Variant]
    costs: Costs
    errors: dict[str, float] = field(default_factory=dict)
    short: list[Record] = field(default_factory=list)

    @property
    def candidates(self) -> list[Variant]:
        """Exact attention, and backends not known to err as the mean of the values; the nearest first."""
        mean, errors = self.errors[MEAN_OF_VALUES], self.errors
        near = [
            variant
            for variant in self.variants
            if variant.backend == YARDSTICK or not mean <= errors[variant.label]
        ]
        return sorted(near, key=lambda variant: (variant.backend != YARDSTICK, errors[variant.label]))

    def speeds(self, tokens: int) -> dict[str, Predicted]:
        """Predicted speed-up over exact attention of backends with enough short calls, by label."""
        models = time_models(self.short, {variant.label: variant.target for variant in self.variants})
        exact = models.pop(YARDSTICK, None)
        if exact is None:
            return {}
        return {label: model.speed(exact, tokens=tokens) for label, model in models.items()}


def attention_steps(
    shipped: Sequence[Sequence[Any]],
    variants: Sequence[Variant],
    lengths: Sequence[int],
    workload: Workload,
    *,
    draws: int,
    rounds: int,
    measurer: Measurer,
    limit_bytes: int | None,
) -> Steps:
    """For each model errors at its length and one round of calls; then all rounds; errors at other lengths.

    The beginning of a causal sequence is a real sequence: its activations do not depend on later tokens.

    Args:
        shipped: q, k, v of the layers of each shipped model.
    """
    sources = []
    for layers in shipped:
        shared = {**vars(workload), **shape_of_subject(layers[0]), "inputs": "gaussian"}
        costs = Costs(shared=shared, measure=measurer, rounds=rounds, limit_bytes=limit_bytes)
        sources.append(Source(layers, variants, costs))
    calls: list[Point] = []
    for source in sources:
        source.errors = yield from _errors(source, source.layers[0].tokens, workload, draws=draws)
        short = [
            source.costs.time(variant, tokens)
            for tokens in sorted({*PROBE, *(length for length in lengths if length <= PROBE[-1])})
            for variant in source.candidates
        ]
        source.short = yield [replace(call, rounds=1) for call in short]
        long = yield from _long_calls(source, [length for length in lengths if length > PROBE[-1]])
        yield [replace(call, rounds=1) for call in long]
        calls += [*short, *long]
    yield calls
    for source in sources:
        if source.layers[0].causal:
            for tokens in lengths:
                if tokens < source.layers[0].tokens:
                    yield from _errors(source, tokens, workload, draws=draws)


def shipped_layers(workload: Workload) -> list[list[Any]]:
    """q, k and v of the layers of each shipped model, in the dtype and on the device of the workload."""
    from efficient_attn.measure.inputs import subjects

    return [[_placed(layer, workload) for layer in subjects([name], seed=workload.seed)] for name in SOURCES]


def _placed(layer: Any, workload: Workload, tokens: int | None = None) -> Any:
    return layer.converted(
        tokens=tokens, dtype=workload.dtype, device=workload.device, causal=workload.causal
    )


def _errors(source: Source, tokens: int, workload: Workload, *, draws: int) -> Any:
    """Yield the errors on all layers, at most up to a failure; returns the medians by label."""
    layers = [_placed(layer, workload, tokens) for layer in source.layers]
    points = error_points(source.variants, layers, workload, draws=draws)
    order = [YARDSTICK, MEAN_OF_VALUES, *(variant.label for variant in source.variants)]
    medians = {}
    for label in dict.fromkeys(label for label in order if label in points):
        errors: list[float] = []
        for point in points[label]:
            record = yield point
            if record.status != "ok":
                break
            errors.append(math.nan if record.output_relative_error is None else record.output_relative_error)
        medians[label] = median(errors) if len(errors) == len(points[label]) else math.inf
    return medians


def _long_calls(source: Source, lengths: Sequence[int]) -> Any:
    """Yield the predicted speeds; returns exact attention and the calls that may be faster by prediction."""
    calls: list[Point] = []
    for tokens in lengths:
        speeds = source.speeds(tokens)
        for variant in source.candidates:
            point, speed = source.costs.time(variant, tokens), speeds.get(variant.label)
            slower = False
            if speed is not None:
                # A resumed run decides by the stored prediction, whatever rounds came after it.
                high = (yield _prediction(point.case, speed)).predicted_speed_high
                slower = high is not None and high < 1
            if variant.backend == YARDSTICK or not (slower or variant.backend == DENSE):
                calls.append(point)
    return calls


def _prediction(timed: Case, speed: Predicted) -> Point:
    case = replace(timed, kind="prediction")
    return Point(case=case, measure=partial(_predicted, case, speed), series="prediction", cost=0.0)


def _predicted(case: Case, speed: Predicted) -> Record:
    value, low, high = speed
    return Record(case=case, predicted_speed=value, predicted_speed_low=low, predicted_speed_high=high)
