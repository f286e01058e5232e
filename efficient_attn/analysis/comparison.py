"""Error, time and memory of backends on the same inputs: Pareto front and verdict."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from efficient_attn.analysis.curves import YARDSTICK
from efficient_attn.analysis.rounds import Typical, call_time, time_ratio
from efficient_attn.analysis.statistics import Middle, middle
from efficient_attn.sweep.layers import single_names
from efficient_attn.sweep.records import Case, Record
from efficient_attn.sweep.sizes import SEED, YARDSTICKS

DEFAULT_MAX_ERROR = 0.1

# Key of a run's environment that holds the error limit.
MAX_ERROR = "max_error"

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
        time_s: Time of one call.
        timed: The record of its times.
        drawn: Whether its features are random.
        failed: Reason for missing values.
    """

    label: str
    backend: str
    error: Middle | None
    time_s: Typical | None
    peak_bytes: int | None
    drawn: bool
    calibrated_on: str | None
    failed: tuple[Record, ...]
    timed: Record | None = None
    layers: int = 1

    @property
    def worst(self) -> float:
        """Error on the layer where it is largest."""
        if self.error is None:
            return float("inf")
        return self.error.high if self.layers > 1 else self.error.median

    @property
    def is_yardstick(self) -> bool:
        """Whether it is a baseline rather than a backend."""
        return self.backend in YARDSTICKS

    def speed(self, other: "Contender | None") -> Typical | None:
        """Speed-up over another contender; None if either was not timed."""
        if self.timed is None or other is None or other.timed is None:
            return None
        return time_ratio(self.timed, other.timed)

    def cost(self, quantity: str) -> float | None:
        """The median time, or the peak memory."""
        if quantity == "time_s":
            return None if self.time_s is None else self.time_s.median
        return self.peak_bytes


class Verdict(NamedTuple):
    """Whether a contender is both nearly exact and faster.

    Attributes:
        both: Nearly exact on every layer, and faster by an interval below the time of exact attention; the
            fastest first.
        alike: Nearly exact, with a time interval that overlaps exact attention's.
        near: All nearly exact contenders except exact attention, by time.
        fast: The faster contender with the smallest error.
        partly: Faster, and nearly exact on some layers only.
    """

    both: tuple[Contender, ...]
    alike: tuple[Contender, ...]
    near: tuple[Contender, ...]
    fast: Contender | None
    partly: tuple[Contender, ...]

    @property
    def accurate(self) -> Contender | None:
        """The fastest nearly exact contender."""
        return self.near[0] if self.near else None


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
        found = [one for one in self.contenders if one.backend == YARDSTICK and one.error and one.time_s]
        return min(found, key=lambda one: len(one.label), default=None)

    @property
    def nearest(self) -> Contender | None:
        """The backend with the smallest error, except `exact`."""
        found = [
            one for one in self.contenders if one.error and not one.is_yardstick and one is not self.exact
        ]
        return min(found, key=_error, default=None)

    @property
    def finished(self) -> set[str]:
        """Labels whose error and time were both measured, or failed."""
        kinds = {
            kind: {record.case.label for record in self.records if record.case.kind == kind}
            for kind in ("error", "time")
        }
        return kinds["error"] & kinds["time"] | {one.label for one in self.contenders if one.failed}

    @property
    def rounding(self) -> float:
        """Largest error that is rounding of the dtype."""
        return max(ROUNDING, 2 * self.exact.worst if self.exact else 0.0)

    def front(self, quantity: str) -> tuple[Contender, ...]:
        """Pareto front of error and this cost, from the cheapest on."""
        front: list[Contender] = []
        least = float("inf")
        for cost, error, one in sorted(self._points(quantity), key=lambda point: point[:2]):
            if error < least:
                front.append(one)
                least = error
            # Equal cost and error: neither dominates the other.
            elif front and error == least and cost == front[-1].cost(quantity):
                front.append(one)
        return tuple(front)

    def verdict(self, max_error: float) -> Verdict:
        """The contenders within `max_error` of exact attention and faster; requires exact attention."""
        exact = self.exact
        assert exact is not None and exact.time_s is not None
        known = [one for one in self.contenders if one.error and one.time_s and not one.is_yardstick]
        others = [one for one in known if one is not exact]
        near = tuple(one for one in others if one.worst <= max_error)
        sides = {one.label: speed.side_of_one for one in others if (speed := one.speed(exact)) is not None}
        faster = [one for one in others if sides[one.label] == 1]
        slower = [one for one in others if sides[one.label] == -1]
        both = tuple(one for one in near if one in faster)
        alike = tuple(one for one in near if one not in faster and one not in slower)
        partly = tuple(
            one
            for one in faster
            if one not in near and one.layers > 1 and one.error and one.error.low <= max_error
        )
        return Verdict(both, alike, near, min(faster, key=_error, default=None), partly)

    def _points(self, quantity: str) -> list[tuple[float, float, Contender]]:
        """Cost and error of contenders that have both; rounding errors count as equal."""
        return [
            (cost, 0.0 if one.error.median <= self.rounding else one.error.median, one)
            for one in self.contenders
            if one.error is not None and (cost := one.cost(quantity)) is not None
        ]


def comparisons(records: Iterable[Record]) -> tuple[Comparison, ...]:
    """One per input, length and number of threads for which both errors and times were measured."""
    latest = {record.case.key: record for record in records if _belongs(record)}
    errors: dict[tuple[object, ...], list[Record]] = {}
    costs: dict[tuple[object, ...], dict[int, list[Record]]] = {}
    for record in latest.values():
        case = record.case
        # Errors depend on the kind of device only, costs on the device.
        key = (case.device.partition(":")[0], *(getattr(case, name) for name in _SHARED))
        if case.kind == "error":
            errors.setdefault((case.inputs, *key), []).append(record)
        else:
            costs.setdefault((case.inputs, *key), {}).setdefault(case.threads, []).append(record)
    return tuple(
        _comparison([*wrong, *group])
        for (inputs, *key), groups in costs.items()
        if (wrong := [one for name in single_names(str(inputs)) for one in errors.get((name, *key), ())])
        for group in groups.values()
        if any(record.case.kind == "time" for record in group)
    )


def asked_error(environment: Mapping[str, Any]) -> float:
    """The error limit of a run, from its environment."""
    known = environment.get(MAX_ERROR)
    known = known if isinstance(known, (int, float)) and not isinstance(known, bool) else 0
    return known if 0 < known < float("inf") else DEFAULT_MAX_ERROR


def comparison_rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """One flat row per backend and comparison, with error, time and memory."""
    return [_row(compared, one) for compared in comparisons(records) for one in compared.contenders]


def without_compared(records: Sequence[Record], compared: Sequence[Comparison]) -> list[Record]:
    """Records that belong to no comparison."""
    told = {record.case.key for one in compared for record in one.records}
    return [record for record in records if record.case.key not in told]


def _row(compared: Comparison, one: Contender) -> dict[str, Any]:
    time_s, error = one.time_s, one.error
    shared = {name: getattr(compared.case, name) for name in ("inputs", *_SHARED, "device", "threads")}
    return {
        "label": one.label,
        "backend": one.backend,
        **shared,
        "output_relative_error": error.median if error else None,
        "error_low": error.low if error else None,
        "error_high": error.high if error else None,
        "draws": error.samples if error else None,
        "time_s": time_s.median if time_s else None,
        "time_low_s": time_s.low if time_s else None,
        "time_high_s": time_s.high if time_s else None,
        "peak_bytes": one.peak_bytes,
        "on_time_front": one in compared.front("time_s"),
        "on_memory_front": one in compared.front("peak_bytes"),
        "reason": "; ".join(f"{bad.status}: {bad.reason}" for bad in one.failed) or None,
    }


def _belongs(record: Record) -> bool:
    """Whether the record measures the output or a forward pass of attention alone."""
    case = record.case
    about = {"error": "output", "time": "attention", "memory": "attention"}
    return about.get(case.kind) == case.of and not case.backward


def _comparison(records: Sequence[Record]) -> Comparison:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.case.label, []).append(record)
    case = next(record.case for record in records if record.case.kind == "time")
    layers = len(single_names(case.inputs))
    found = [_contender(label, group, layers) for label, group in groups.items()]
    return Comparison(case, tuple(sorted(found, key=_place)), tuple(records))


def _contender(label: str, group: Sequence[Record], layers: int) -> Contender:
    errors = [record for record in group if record.case.kind == "error"]
    time, memory = (
        next((record for record in group if record.case.kind == kind), None) for kind in ("time", "memory")
    )
    timed = time if time is not None and time.status == "ok" and time.times_s else None
    return Contender(
        label=label,
        backend=group[0].case.backend,
        error=_error_over([_error_of(record) for record in errors]) if len(errors) == layers else None,
        time_s=call_time(timed) if timed is not None else None,
        timed=timed,
        peak_bytes=None if memory is None else memory.peak_bytes,
        drawn=SEED in group[0].case.options,
        calibrated_on=next((one.calibrated_on for one in group if one.calibrated_on), None),
        failed=tuple(record for record in group if record.status != "ok"),
        layers=layers,
    )


def _error_over(layers: Sequence[Middle | None]) -> Middle | None:
    """The error of a single layer, or the median and range over several; None if a layer has none."""
    known = [one for one in layers if one is not None]
    if not known or len(known) < len(layers):
        return None
    if len(known) == 1:
        return known[0]
    medians = [one.median for one in known]
    return Middle(median(medians), min(medians), max(medians), min(one.samples for one in known))


def _error_of(record: Record) -> Middle | None:
    """Median over draws; None if a draw was not finite, which is null in the file."""
    draws = record.output_relative_error_draws or ()
    if record.status != "ok" or record.output_relative_error is None or None in draws:
        return None
    return middle(draws or [record.output_relative_error])


def _place(one: Contender) -> tuple[bool, float, float]:
    time_s = one.cost("time_s")
    return time_s is None, time_s or 0.0, _error(one)


def _error(one: Contender) -> float:
    return one.error.median if one.error is not None else float("inf")
