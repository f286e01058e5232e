"""Curves of cost against tokens, their growth, and speed-ups over exact attention with crossovers.

The cost of attention, a block and an encoder has one part per token and one per pair of tokens. The lead over
exact attention, as the difference of their times divided by the tokens, is therefore interpolated linearly
between two lengths, and extrapolated by the line through the last two. The crossover is its last zero, and
the ends of its interval are the zeros of the ends of the intervals of the leads.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.variants import CEILING, YARDSTICK
from efficient_attn.stats.estimates import Typical, call_time, last_rise, on_device, time_ratio

# Kind of record that holds each quantity.
QUANTITIES = {
    "time_s": "time",
    "peak_bytes": "memory",
    "parameter_bytes": "memory",
    "state_bytes": "memory",
}

# Names of times in tables, of device times too; the CPU has one time.
TIME, DEVICE_TIME = "time", "device time"

# Limit of extrapolation, as a multiple of the longest length.
FURTHEST = 8

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
    def growth(self) -> Typical | None:
        """Power of the tokens with which the cost grows from the third longest to the longest length."""
        costs = [
            (point.tokens, point.value, point.high or point.value) for point in self.measured if point.value
        ]
        if len(costs) < 2:
            return None
        (first, cost, high), (last, last_cost, last_high) = costs[-3:][0], costs[-1]
        step = math.log(last / first)
        power = math.log(last_cost / cost) / step
        half = math.hypot(math.log(high / cost), math.log(last_high / last_cost)) / step
        return Typical(power, power - half, power + half, len(costs))

    @property
    def setting(self) -> tuple[Any, ...]:
        """Setting of the measurement, equal for comparable curves."""
        # The label names the execution.
        return tuple(getattr(self.points[0].record.case, field) for field in (*_MAY_DIFFER, "execution"))


class SpeedUp(NamedTuple):
    """Speed-ups of a backend over exact attention in the same setting.

    Attributes:
        case: Case of the backend at the longest common length.
        ratios: Speed-up at every common length, above 1 if the backend is faster.
        leads: Seconds per token by which exact attention is slower, with an interval: [3 lengths].
    """

    label: str
    case: Case
    ratios: Mapping[int, Typical]
    leads: np.ndarray

    @property
    def last(self) -> Typical:
        """Speed-up at the longest common length."""
        return self.ratios[self.case.tokens]

    @property
    def crossover(self) -> tuple[float | None, float | None, float | None]:
        """Length above which the backend is faster, and the ends of its interval.

        Each is the shortest length if the backend is faster everywhere, and None if it is slower at FURTHEST
        times the longest length.
        """
        lengths, leads = np.array([*self.ratios], dtype=float), self.leads
        if len(lengths) > 1:
            further = lengths[-1] * np.geomspace(1, FURTHEST, 10)[1:]
            share = (further - lengths[-2]) / (lengths[-1] - lengths[-2])
            # The errors of both ends of the line are independent.
            with np.errstate(all="ignore"):
                value = (1 - share) * leads[0, -2] + share * leads[0, -1]
                half = np.hypot((1 - share) * (leads[0] - leads[1])[-2], share * (leads[0] - leads[1])[-1])
                leads = np.hstack([leads, [value, value - half, value + half]])
            lengths = np.append(lengths, further)
        value, low, high = (last_rise(lengths, row) for row in leads)
        return value, high, low


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


def speed_ups(all_curves: Sequence[Curve]) -> list[SpeedUp]:
    """Speed-ups of all curves of times with the only curve of exact attention in their setting."""
    settings = [(curve, curve.setting) for curve in all_curves]
    compared = []
    for curve, setting in settings:
        exact = [match for match, same in settings if match.backend == YARDSTICK and same == setting]
        if len(exact) != 1 or exact[0] is curve:
            continue
        baseline = {point.tokens: point for point in exact[0].measured}
        pairs = [(point, baseline[point.tokens]) for point in curve.measured if point.tokens in baseline]
        if not pairs:
            continue
        ratios = {point.tokens: time_ratio(point.record, exact.record) for point, exact in pairs}
        edges = np.array([ratio[:3] for ratio in ratios.values()], dtype=float)
        seconds = np.array([[(exact.value or 0.0) / exact.tokens] for _, exact in pairs])
        with np.errstate(all="ignore"):
            leads = (seconds * (1 - 1 / edges)).T
        compared.append(SpeedUp(curve.label, pairs[-1][0].record.case, ratios, leads))
    return compared


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
