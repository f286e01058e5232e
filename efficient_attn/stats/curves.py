"""Curves of cost against tokens, one per variant."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.variants import CEILING, YARDSTICK
from efficient_attn.stats.estimates import call_time, on_device
from efficient_attn.stats.growth import Growth, exact_growth, growth

# Kind of record that holds each quantity.
QUANTITIES = {
    "time_s": "time",
    "peak_bytes": "memory",
    "parameter_bytes": "memory",
    "state_bytes": "memory",
}

# Names of times in tables, of device times too; the CPU has one time.
TIME, DEVICE_TIME = "time", "device time"

# Fields that may differ between the cases of several runs, and then become part of the curve's name.
_MAY_DIFFER = (
    *("of", "layers", "batch", "num_heads", "num_kv_heads", "head_dim", "causal", "backward"),
    *("dtype", "device", "threads", "inputs", "seed", "l2"),
)

Namer = Callable[[Case], str]


class Point(NamedTuple):
    """Cost at a length with its interval, or None and a failed record."""

    tokens: int
    value: float | None
    low: float | None
    high: float | None
    record: Record


class Curve(NamedTuple):
    """The points of one backend in rising order of tokens."""

    label: str
    backend: str
    quantity: str
    points: tuple[Point, ...]

    @property
    def measured(self) -> tuple[Point, ...]:
        """All points with a value."""
        return tuple(point for point in self.points if point.value is not None)

    @property
    def growth(self) -> Growth | None:
        """Growth of the values with the number of tokens."""
        tokens = [point.tokens for point in self.measured]
        fit = growth if self.quantity == "time_s" else exact_growth
        return fit(tokens, [float(point.value or 0) for point in self.measured])

    @property
    def setting(self) -> tuple[Any, ...]:
        """Setting of the measurement, equal for comparable curves."""
        # The label names the execution.
        return tuple(getattr(self.points[0].record.case, field) for field in (*_MAY_DIFFER, "execution"))

    def at(self, tokens: int) -> Point | None:
        """The measured point at this length."""
        return next((point for point in self.measured if point.tokens == tokens), None)


def curves(records: Iterable[Record], quantity: str) -> tuple[Curve, ...]:
    """Curves of `time_s`, `peak_bytes`, `parameter_bytes` or `state_bytes`.

    Baselines come first, then the other curves by name, independently of the order of the records. The last
    of equal cases counts.
    """
    latest = {record.case.key: record for record in records if record.case.kind == QUANTITIES[quantity]}
    name = namer([record.case for record in latest.values()])
    groups: dict[str, list[Record]] = {}
    for record in sorted(latest.values(), key=lambda record: record.case.tokens):
        groups.setdefault(name(record.case), []).append(record)
    return tuple(
        Curve(label, group[0].case.backend, quantity, tuple(_point(record, quantity) for record in group))
        for label, group in sorted(groups.items(), key=_sort_key)
    )


def grouped(records: Iterable[Record], *fields: str) -> list[list[Record]]:
    """Group records by fields of their cases, the last of equal cases."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in {record.case.key: record for record in records}.values():
        groups.setdefault(tuple(getattr(record.case, name) for name in fields), []).append(record)
    return list(groups.values())


def by_subject(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Costs by subject: attention, the block, the encoder of 3 layers, …."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record.case.kind in QUANTITIES.values():
            of, layers = record.case.of, record.case.layers
            groups.setdefault(of if layers is None else f"{of} of {layers} layers", []).append(record)
    return groups


def by_clock(records: Sequence[Record]) -> dict[str, Sequence[Record]]:
    """Records by TIME, and copies with device times as times by DEVICE_TIME."""
    queued = [on_device(record) for record in records if record.device_times_s]
    return {TIME: records, DEVICE_TIME: queued} if queued else {TIME: records}


def partner(curve: Curve, all_curves: Iterable[Curve], backend: str) -> Curve | None:
    """The only curve of the backend in the same setting, if any."""
    matches = [match for match in all_curves if match.backend == backend and match.setting == curve.setting]
    return matches[0] if len(matches) == 1 else None


def namer(cases: Sequence[Case]) -> Namer:
    """Names from the label and the fields that differ between cases."""
    differ = [field for field in _MAY_DIFFER if len({str(getattr(case, field)) for case in cases}) > 1]
    return lambda case: ", ".join(filter(None, [case.label, *(_say(case, field) for field in differ)]))


def _say(case: Case, field: str) -> str:
    value = getattr(case, field)
    if isinstance(value, bool) or value is None:
        return field if value else ""
    return value if isinstance(value, str) else f"{field}={value}"


def _sort_key(item: tuple[str, list[Record]]) -> tuple[bool, bool, list[tuple[int, str]]]:
    """Baselines first, numbers in names as numbers: rank=64 before rank=128."""
    label, group = item
    pieces = re.findall(r"\d+|\D+", label)
    name = [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in pieces]
    backend = group[0].case.backend
    return backend != YARDSTICK, backend != CEILING, name


def _point(record: Record, quantity: str) -> Point:
    value, low, high = None, None, None
    if record.status == "ok" and quantity != "time_s":
        value = low = high = getattr(record, quantity)
    elif record.status == "ok" and record.times_s:
        value, low, high, _ = call_time(record)
    return Point(record.case.tokens, value, low, high, record)
