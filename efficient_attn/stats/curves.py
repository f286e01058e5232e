"""Curves of cost against tokens, one per variant, and the power of tokens with which they grow.

A measured cost is y = a + b·nᵖ, with a fixed and a growing part. A straight line through logarithms mixes
both and underestimates p wherever the fixed part matters, so all three numbers are fitted together: for a
given p the best a ≥ 0 and b ≥ 0 solve a small linear problem, and p is searched for. Residuals are relative,
so that all lengths have equal weight. The interval holds every p whose residuals are not significantly larger
than the smallest (F test, 95 %). It requires four lengths, and is wide if the lengths do not span enough to
separate a fixed part from slow growth. Three lengths always fit exactly: their power is unclear.

Bytes have no noise, but they have kinks: a workspace grows with the sequence until it holds one block. The
fit of exact costs therefore starts at the shortest length from which on one curve meets every point.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.variants import CEILING, YARDSTICK
from efficient_attn.stats.estimates import call_time, on_device
from efficient_attn.stats.significance import quantile

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

# Grid of powers, finer than the resolution of any measurement.
_POWERS = np.linspace(0.05, 4.0, 1581)

# Number of fitted parameters.
_FEWEST_LENGTHS = 3
_FITTED = 3

# Costs that change by less than this share over all lengths are constant.
_FLAT = 0.01

# Largest relative distance of exact costs from a curve that meets them.
_MEETS = 0.005

# Widest interval that separates linear from quadratic growth.
_TELLING = 1.0

# Residuals below this are rounding: a relative error of a millionth.
_EXACT = 1e-12


class Growth(NamedTuple):
    """y = fixed + factor·tokens^power, an interval, and the largest relative distance."""

    power: float
    low: float | None
    high: float | None
    fixed: float
    factor: float
    worst: float

    @property
    def clear(self) -> bool:
        """Whether the power has a narrow enough interval, or is zero."""
        if self.low is None or self.high is None:
            return self.power == 0
        # The interval is truncated at the ends of the grid.
        inside = self.low > _POWERS[0] and self.high < _POWERS[-1]
        return bool(inside) and self.high - self.low <= _TELLING


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


def growth(tokens: Sequence[float], costs: Sequence[float]) -> Growth | None:
    """Fit positive costs at different lengths; None for fewer than three lengths."""
    n, y = np.asarray(tokens, dtype=float), np.asarray(costs, dtype=float)
    if len(np.unique(n)) < _FEWEST_LENGTHS or (y <= 0).any():
        return None
    if y.max() - y.min() <= _FLAT * y.max():
        return Growth(0.0, None, None, float(y.mean()), 0.0, float(np.ptp(y) / y.max()))
    # Lengths are scaled by the longest, so that nᵖ ≤ 1 for every p.
    unit = n.max()
    fixed, factor = _best_parts(n / unit, y)
    fitted = fixed[:, None] + factor[:, None] * (n / unit) ** _POWERS[:, None]
    residuals = ((fitted / y - 1) ** 2).sum(axis=1)
    best = int(residuals.argmin())
    low, high = _interval(residuals, freedom=len(n) - _FITTED)
    power = float(_POWERS[best])
    worst = float(np.abs(fitted[best] / y - 1).max())
    return Growth(power, low, high, float(fixed[best]), float(factor[best] / unit**power), worst)


def exact_growth(tokens: Sequence[float], costs: Sequence[float]) -> Growth | None:
    """Fit costs without noise from the length where a curve meets all.

    At least four lengths are kept; if no four of them lie on one curve, all are fitted.
    """
    for start in range(len(tokens) - _FITTED):
        fit = growth(tokens[start:], costs[start:])
        if fit is not None and fit.worst <= _MEETS:
            return fit
    return growth(tokens, costs)


def _best_parts(n: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Parts a ≥ 0 and b ≥ 0 of least |a/y + b·nᵖ/y − 1|² for each power."""
    u, w = 1 / y, n ** _POWERS[:, None] / y  # w [powers lengths]
    uu, uw, ww, u1, w1 = u @ u, w @ u, (w * w).sum(axis=1), u.sum(), w.sum(axis=1)
    determinant = uu * ww - uw**2
    fixed, factor = (u1 * ww - w1 * uw) / determinant, (w1 * uu - u1 * uw) / determinant
    # The constrained optimum is on the edge of the quadrant with the smaller residual.
    edge_is_fixed = u1**2 / uu >= w1**2 / ww
    outside = ~((fixed >= 0) & (factor >= 0))
    fixed = np.where(outside, np.where(edge_is_fixed, u1 / uu, 0.0), fixed)
    factor = np.where(outside, np.where(edge_is_fixed, 0.0, w1 / ww), factor)
    return fixed, factor


def _interval(residuals: np.ndarray, *, freedom: int) -> tuple[float | None, float | None]:
    if freedom < 1:
        return None, None
    # F with one numerator degree of freedom is the square of Student's t.
    bound = max(residuals.min(), _EXACT) * (1 + quantile(0.025, freedom) ** 2 / freedom)
    inside = _POWERS[residuals <= bound]
    return float(inside.min()), float(inside.max())
