"""Error, time and memory of backends on the same inputs: the front of them, and what is worth its error."""

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

# Where the environment of a run says how much error was asked about.
MAX_ERROR = "max_error"

# Relative errors below this, or below twice that of exact attention in the same dtype, are rounding: of two
# of them none is the smaller one.
ROUNDING = 1e-4

# What the cases of one comparison have in common.
_SHARED = ("tokens", "batch", "num_heads", "head_dim", "causal", "dtype", "seed")


class Contender(NamedTuple):
    """What was measured of one backend, or of a yardstick; None is what was not.

    Attributes:
        error: Relative output error, its median over draws; of several layers their median and their range.
        layers: Number of layers that the error was measured on.
        time_s: Of one call.
        timed: The record of its times.
        drawn: Its features are random.
        failed: Why something is lacking.
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
        """The error on the layer where it is largest."""
        if self.error is None:
            return float("inf")
        return self.error.high if self.layers > 1 else self.error.median

    @property
    def is_yardstick(self) -> bool:
        """Whether it is a line to read others against, and no method."""
        return self.backend in YARDSTICKS

    def speed(self, other: "Contender | None") -> Typical | None:
        """How many times as fast as another it is; None where one of them was not timed."""
        if self.timed is None or other is None or other.timed is None:
            return None
        return time_ratio(self.timed, other.timed)

    def cost(self, quantity: str) -> float | None:
        """The median time, or the peak memory."""
        if quantity == "time_s":
            return None if self.time_s is None else self.time_s.median
        return self.peak_bytes


class Verdict(NamedTuple):
    """Whether anything is both nearly exact and faster.

    Attributes:
        both: What is, on every layer, the fastest first: its interval of times lies below that of exact
            attention.
        alike: Nearly exact, with an interval of times that overlaps that of exact attention.
        near: All that is nearly exact, exact attention aside, by time.
        fast: The least wrong of what is faster.
        partly: Faster, and nearly exact on some layers only.
    """

    both: tuple[Contender, ...]
    alike: tuple[Contender, ...]
    near: tuple[Contender, ...]
    fast: Contender | None
    partly: tuple[Contender, ...]

    @property
    def accurate(self) -> Contender | None:
        """The fastest of what is nearly exact."""
        return self.near[0] if self.near else None


class Comparison(NamedTuple):
    """Everything measured on one input at one length.

    Attributes:
        case: The case of one of the times.
        contenders: By time, the fastest first; last what was not timed.
        records: Those that it is made of.
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
        """The least error of what is no yardstick and not `exact`."""
        found = [
            one for one in self.contenders if one.error and not one.is_yardstick and one is not self.exact
        ]
        return min(found, key=_error, default=None)

    @property
    def finished(self) -> set[str]:
        """Labels of which both error and time were measured, or failed."""
        kinds = {
            kind: {record.case.label for record in self.records if record.case.kind == kind}
            for kind in ("error", "time")
        }
        return kinds["error"] & kinds["time"] | {one.label for one in self.contenders if one.failed}

    @property
    def rounding(self) -> float:
        """Errors up to this are those of the dtype and not of a method."""
        return max(ROUNDING, 2 * self.exact.worst if self.exact else 0.0)

    def front(self, quantity: str) -> tuple[Contender, ...]:
        """What nothing else beats in both error and this cost (Pareto), from the cheapest on."""
        front: list[Contender] = []
        least = float("inf")
        for cost, error, one in sorted(self._points(quantity), key=lambda point: point[:2]):
            if error < least:
                front.append(one)
                least = error
            # The same cost and the same error twice: neither beats the other.
            elif front and error == least and cost == front[-1].cost(quantity):
                front.append(one)
        return tuple(front)

    def verdict(self, max_error: float) -> Verdict:
        """What is within `max_error` of exact attention and faster than it; exact attention is measured."""
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
        """Cost and error of what has both; errors that are rounding are equal."""
        return [
            (cost, 0.0 if one.error.median <= self.rounding else one.error.median, one)
            for one in self.contenders
            if one.error is not None and (cost := one.cost(quantity)) is not None
        ]


def comparisons(records: Iterable[Record]) -> tuple[Comparison, ...]:
    """One for each input, length and number of threads where both errors and times were measured."""
    latest = {record.case.key: record for record in records if _belongs(record)}
    errors: dict[tuple[object, ...], list[Record]] = {}
    costs: dict[tuple[object, ...], dict[int, list[Record]]] = {}
    for record in latest.values():
        case = record.case
        # Errors know the kind of device, costs which one it was.
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
    """The error that a run asked about, as its environment tells."""
    known = environment.get(MAX_ERROR)
    known = known if isinstance(known, (int, float)) and not isinstance(known, bool) else 0
    return known if 0 < known < float("inf") else DEFAULT_MAX_ERROR


def comparison_rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """One flat row for each backend of each comparison: error, time and memory side by side."""
    return [_row(compared, one) for compared in comparisons(records) for one in compared.contenders]


def without_compared(records: Sequence[Record], compared: Sequence[Comparison]) -> list[Record]:
    """The records that are part of no comparison."""
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
    """Whether it is about attention alone, forward, and its output."""
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
    """The error of the only layer; of several their median and range; None where one has none."""
    known = [one for one in layers if one is not None]
    if not known or len(known) < len(layers):
        return None
    if len(known) == 1:
        return known[0]
    medians = [one.median for one in known]
    return Middle(median(medians), min(medians), max(medians), min(one.samples for one in known))


def _error_of(record: Record) -> Middle | None:
    """The median over draws; None where a draw was not finite, which is null in the file."""
    draws = record.output_relative_error_draws or ()
    if record.status != "ok" or record.output_relative_error is None or None in draws:
        return None
    return middle(draws or [record.output_relative_error])


def _place(one: Contender) -> tuple[bool, float, float]:
    time_s = one.cost("time_s")
    return time_s is None, time_s or 0.0, _error(one)


def _error(one: Contender) -> float:
    return one.error.median if one.error is not None else float("inf")
