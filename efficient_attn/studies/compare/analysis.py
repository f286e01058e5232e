"""Error, time and memory of backends on the same inputs, from records: Pareto front and verdict."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.variants import MEAN_OF_VALUES, YARDSTICK, single_names
from efficient_attn.stats.curves import grouped
from efficient_attn.stats.estimates import Middle, Typical, call_time, middle, time_ratio
from efficient_attn.studies.compare.plan import DEFAULT_MAX_ERROR, MAX_ERROR

# Relative errors below this, or below twice the error of exact attention in the same dtype, are rounding
# and count as equal.
ROUNDING = 1e-4

# Fields common to all cases of one comparison.
_SHARED = ("tokens", "batch", "num_heads", "head_dim", "causal", "dtype", "seed")


class Contender(NamedTuple):
    """Measurements of one backend or baseline; None: not measured.

    Attributes:
        error: Relative output error, median over draws; for several layers their median and range.
        layers: Number of layers in the error.
        timed: The record of its times.
        failed: Records of failures.
    """

    label: str
    backend: str
    error: Middle | None
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

    @property
    def time_s(self) -> Typical | None:
        """Time of one call."""
        return None if self.timed is None else call_time(self.timed)

    def cost(self, quantity: str) -> float | None:
        """The median time, or the peak memory."""
        if quantity == "time_s":
            return None if self.time_s is None else self.time_s.median
        return self.peak_bytes


class Comparison(NamedTuple):
    """All measurements on one input at one length.

    Attributes:
        case: The case of one of the times.
        contenders: By time, the fastest first; untimed ones last.
        records: The records of the comparison.
    """

    case: Case
    contenders: tuple[Contender, ...]
    records: tuple[Record, ...]

    @property
    def exact(self) -> Contender | None:
        """Exact attention through the fused kernel, if both its error and its time were measured."""
        found = [one for one in self.contenders if one.backend == YARDSTICK and one.error and one.timed]
        return min(found, key=lambda one: len(one.label), default=None)

    @property
    def candidates(self) -> list[Contender]:
        """Backends with an error, except `exact`."""
        known = [one for one in self.contenders if one.error and one.backend != MEAN_OF_VALUES]
        return [one for one in known if one is not self.exact]

    @property
    def rounding(self) -> float:
        """Largest error that is rounding of the dtype."""
        return max(ROUNDING, 2 * self.exact.worst if self.exact else 0.0)

    def front(self, quantity: str) -> tuple[Contender, ...]:
        """Pareto front of error and this cost; rounding errors count as equal."""
        points = [
            (cost, 0.0 if one.error.median <= self.rounding else one.error.median, one)
            for one in self.contenders
            if one.error is not None and (cost := one.cost(quantity)) is not None
        ]
        return tuple(
            one
            for cost, error, one in points
            if not any(
                other_cost <= cost and other_error <= error and (other_cost, other_error) != (cost, error)
                for other_cost, other_error, _ in points
            )
        )

    def near(self, max_error: float) -> list[Contender]:
        """Nearly exact contenders except exact attention, by time."""
        return [one for one in self.candidates if one.timed and one.worst <= max_error]

    def faster(self, contenders: Iterable[Contender], side: int = 1) -> list[Contender]:
        """Contenders that are significantly faster than exact attention; with side 0 the unclear ones."""
        exact = self.exact and self.exact.timed
        speeds = [(one, time_ratio(one.timed, exact)) for one in contenders if one.timed and exact]
        return [one for one, speed in speeds if speed.side_of_one == side]


def nearest(contenders: Iterable[Contender]) -> Contender | None:
    """The contender with the smallest error."""
    return min(contenders, key=lambda one: one.error.median if one.error else float("inf"), default=None)


def asked_error(environment: Mapping[str, Any]) -> float:
    """The error limit of a run, from its environment."""
    known = environment.get(MAX_ERROR)
    known = known if isinstance(known, (int, float)) and not isinstance(known, bool) else 0
    return known if 0 < known < float("inf") else DEFAULT_MAX_ERROR


def comparisons(records: Iterable[Record]) -> tuple[Comparison, ...]:
    """One per input, length, pass and number of threads for which both errors and times were measured."""
    errors: dict[tuple[object, ...], list[Record]] = {}
    costs: dict[tuple[Any, ...], list[Record]] = {}
    for record in {record.case.key: record for record in records}.values():
        case = record.case
        # Errors depend on the kind of device only, costs on the device.
        key = (case.device.partition(":")[0], *(getattr(case, name) for name in _SHARED))
        if (case.kind, case.of) == ("error", "output"):
            errors.setdefault((case.inputs, key), []).append(record)
        elif case.kind in ("time", "memory") and case.of == "attention":
            costs.setdefault((case.inputs, key, case.threads, case.backward), []).append(record)
    return tuple(
        _comparison([*wrong, *group])
        for (inputs, key, *_), group in costs.items()
        if (wrong := [one for name in single_names(inputs) for one in errors.get((name, key), ())])
        and any(record.case.kind == "time" for record in group)
    )


def _comparison(records: Sequence[Record]) -> Comparison:
    case = next(record.case for record in records if record.case.kind == "time")
    layers = len(single_names(case.inputs))
    groups = grouped(records, "label")
    found = [_contender(group, layers) for group in groups]
    return Comparison(case, tuple(sorted(found, key=_place)), tuple(records))


def _contender(group: Sequence[Record], layers: int) -> Contender:
    errors = [_error_of(record) for record in group if record.case.kind == "error"]
    known = [error for error in errors if error is not None]
    times = [record for record in group if record.case.kind == "time"]
    return Contender(
        label=group[0].case.label,
        backend=group[0].case.backend,
        error=_over_layers(known) if len(known) == layers else None,
        layers=layers,
        timed=next((record for record in times if record.status == "ok" and record.times_s), None),
        peak_bytes=next((one.peak_bytes for one in group if one.peak_bytes is not None), None),
        failed=tuple(record for record in group if record.status != "ok"),
    )


def _error_of(record: Record) -> Middle | None:
    """Median over draws; None if a draw was not finite, which is null in the file."""
    draws = record.output_relative_error_draws or ()
    if record.status != "ok" or record.output_relative_error is None or None in draws:
        return None
    return middle(draws or [record.output_relative_error])


def _over_layers(errors: Sequence[Middle]) -> Middle:
    """The error of a single layer, or the median and range over several."""
    if len(errors) == 1:
        return errors[0]
    medians = [one.median for one in errors]
    return Middle(median(medians), min(medians), max(medians), min(one.samples for one in errors))


def _place(one: Contender) -> tuple[bool, float, float]:
    time_s = one.cost("time_s")
    return time_s is None, time_s or 0.0, one.error.median if one.error else float("inf")
