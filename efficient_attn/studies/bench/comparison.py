"""Error, time and memory of backends at one length, from records: Pareto front and verdict."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from efficient_attn.measure.record import Case, Record, replace
from efficient_attn.measure.variants import UNIFORM_ATTENTION, YARDSTICK, joint_name, single_names
from efficient_attn.runs.store import over_budget
from efficient_attn.stats.estimates import Middle, Typical, call_time, grouped, middle, time_ratio

# Relative errors below this, or below twice the error of exact attention in the same dtype, are rounding
# and count as equal.
ROUNDING = 1e-4

GAUSSIAN = "gaussian"

# Fields common to errors and costs of one comparison; costs on the inputs of the errors share their shape.
_SHARED = ("tokens", "causal", "dtype", "seed")
_SHAPE = ("batch", "num_heads", "head_dim")


class Contender(NamedTuple):
    """Measurements of one backend or baseline, None where not measured.

    Attributes:
        error: Relative output error, median over draws; for several layers their median and range.
        mse: Mean squared error of the output, in the same way.
        layers: Number of layers in the error.
        timed: The record of its times.
        failed: Records of failures.
    """

    label: str
    backend: str
    error: Middle | None
    mse: Middle | None
    layers: int
    timed: Record | None
    peak_bytes: int | None
    failed: tuple[Record, ...]

    @property
    def worst(self) -> float:
        """Error on the layer where it is largest."""
        if self.error is None:
            return float("inf")
        return self.error.high if self.layers > 1 else self.error.median

    def cost(self, quantity: str) -> float | None:
        """The median time, or the peak memory."""
        if quantity == "peak_bytes":
            return self.peak_bytes
        return None if self.timed is None else call_time(self.timed).median


class Comparison(NamedTuple):
    """All measurements of one workload at one length.

    Attributes:
        case: The case of one of the times.
        errors: The case of one of the errors.
        inputs: Inputs of the errors, all layers together.
        contenders: By time, the fastest first; untimed ones last.
        records: The records of the comparison.
    """

    case: Case
    errors: Case
    inputs: str
    contenders: tuple[Contender, ...]
    records: tuple[Record, ...]

    @property
    def exact(self) -> Contender | None:
        """Exact attention through the fused kernel, if both its error and its time were measured."""
        rows = [row for row in self.contenders if row.backend == YARDSTICK and row.error and row.timed]
        return min(rows, key=lambda row: len(row.label), default=None)

    def row(self, label: str) -> Contender | None:
        """The contender of that name."""
        return next((row for row in self.contenders if row.label == label), None)

    @property
    def candidates(self) -> list[Contender]:
        """Backends with an error, except `exact`."""
        rows = [row for row in self.contenders if row.error and row.backend != UNIFORM_ATTENTION]
        return [row for row in rows if row is not self.exact]

    @property
    def rounding(self) -> float:
        """Largest error that is rounding of the dtype."""
        return max(ROUNDING, 2 * self.exact.worst if self.exact else 0.0)

    def front(self, quantity: str) -> tuple[Contender, ...]:
        """Pareto front of error and this cost, with rounding errors equal."""
        points = [
            (cost, 0.0 if row.error.median <= self.rounding else row.error.median, row)
            for row in self.contenders
            if row.error is not None and (cost := row.cost(quantity)) is not None
        ]
        return tuple(
            row
            for cost, error, row in points
            if not any(x <= cost and y <= error and (x, y) != (cost, error) for x, y, _ in points)
        )

    def near(self, max_error: float) -> list[Contender]:
        """Nearly exact contenders except exact attention, by time."""
        return [row for row in self.candidates if row.timed and row.worst <= max_error]

    def speed(self, row: Contender) -> Typical:
        """Speed-up over exact attention. Undecided if one of them was not timed."""
        if row.timed is None or self.exact is None or self.exact.timed is None:
            return Typical(1.0, None, None, 0)
        return time_ratio(row.timed, self.exact.timed)

    def faster(self, contenders: Iterable[Contender], side: int = 1) -> list[Contender]:
        """Contenders significantly faster than exact attention, or the unclear ones with side 0."""
        return [row for row in contenders if row.timed and self.speed(row).side_of_one == side]


def comparisons(records: Iterable[Record]) -> tuple[Comparison, ...]:
    """One per input, length, pass and number of threads with both errors and times, the shortest first."""
    errors: dict[tuple[Any, ...], dict[str, list[Record]]] = {}
    costs: dict[tuple[Any, ...], list[Record]] = {}
    for record in {record.case.key: record for record in records}.values():
        case = record.case
        # Errors depend on the kind of device only, costs on the device.
        key = (case.device.partition(":")[0], *(getattr(case, name) for name in _SHARED))
        if (case.kind, case.of) == ("error", "output"):
            errors.setdefault(key, {}).setdefault(case.inputs, []).append(record)
        elif case.kind in ("time", "memory") and case.of == "attention" and case.execution is None:
            shape = tuple(getattr(case, name) for name in _SHAPE)
            costs.setdefault((key, case.inputs, shape, case.threads, case.backward), []).append(record)
    complete = []
    for (key, inputs, *_), group in costs.items():
        measured = errors.get(key, {})
        # Errors on the inputs of the costs, or beside Gaussian ones those of each model.
        models: dict[str, dict[str, list[Record]]] = {}
        for name in measured if inputs == GAUSSIAN else single_names(inputs):
            if name in measured:
                models.setdefault(name.rpartition("(")[0], {})[name] = measured[name]
        for errors_of_model in models.values() if any(r.case.kind == "time" for r in group) else ():
            comparison = _comparison(group, errors_of_model)
            # Where the budget did not reach the error of exact attention, there is nothing to compare.
            if comparison.exact or not any(map(over_budget, comparison.records)):
                complete.append(comparison)
    return tuple(sorted(complete, key=lambda comparison: comparison.case.tokens))


def by_setting(all_comparisons: Iterable[Comparison]) -> list[list[Comparison]]:
    """Comparisons that differ in length alone, the shortest first."""
    groups: dict[tuple[Any, ...], list[Comparison]] = {}
    for comparison in all_comparisons:
        case, model = comparison.case, comparison.inputs.rpartition("(")[0]
        # The layers that are long enough may be fewer at longer lengths.
        inputs = case.inputs if case.inputs != GAUSSIAN else model
        groups.setdefault(
            (inputs, replace(case, tokens=1, inputs=GAUSSIAN, label="", backend="", options={}).key), []
        ).append(comparison)
    return list(groups.values())


def _comparison(costs: Sequence[Record], errors: Mapping[str, Sequence[Record]]) -> Comparison:
    case = next(record.case for record in costs if record.case.kind == "time")
    records = (*(record for group in errors.values() for record in group), *costs)
    layers = len(errors) if case.inputs == GAUSSIAN else len(single_names(case.inputs))
    rows = [_contender(group, layers) for group in grouped(records, "label")]
    contenders = tuple(sorted(rows, key=_place))
    return Comparison(case, records[0].case, joint_name(list(errors)), contenders, records)


def _contender(group: Sequence[Record], layers: int) -> Contender:
    errors = [record for record in group if record.case.kind == "error"]
    times = [record for record in group if record.case.kind == "time"]
    return Contender(
        label=group[0].case.label,
        backend=group[0].case.backend,
        error=_over_layers(errors, "output_relative_error", layers),
        mse=_over_layers(errors, "output_mse", layers),
        layers=layers,
        timed=next((record for record in times if record.status == "ok" and record.times_s), None),
        peak_bytes=next((record.peak_bytes for record in group if record.peak_bytes is not None), None),
        failed=tuple(record for record in group if record.status != "ok"),
    )


def _over_layers(errors: Sequence[Record], quantity: str, layers: int) -> Middle | None:
    """Median over draws on a single layer, median and range over several, or None."""
    medians = []
    for record in errors:
        mean, draws = getattr(record, quantity), getattr(record, f"{quantity}_draws") or ()
        # A draw that was not finite is null in the file.
        if record.status == "ok" and mean is not None and None not in draws:
            medians.append(middle(draws or [mean]))
    if len(medians) != layers:
        return None
    if layers == 1:
        return medians[0]
    values = [value.median for value in medians]
    return Middle(median(values), min(values), max(values), min(value.samples for value in medians))


def _place(row: Contender) -> tuple[bool, float, float]:
    time_s = row.cost("time_s")
    return time_s is None, time_s or 0.0, row.error.median if row.error else float("inf")
