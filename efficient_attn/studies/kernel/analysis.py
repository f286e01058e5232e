"""Kernel-error records as lines over features, angle or norm: measured and theoretical."""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from efficient_attn.runner.records import Record
from efficient_attn.runner.sizes import sized

# Possible horizontal axes.
AXES = ("size", "angle", "norm")

_PLACE = re.compile(r"pair\(norm=([\d.e+-]+), angle=([\d.e+-]+)\)")


class KernelPoint(NamedTuple):
    """Mean squared error of one kernel entry over its square.

    Attributes:
        mean: Mean over draws; None if not measurable.
        error: Standard error of the mean over draws; None for a single draw.
        expected: Theoretical error; None without a closed form.
    """

    size: int
    norm: float
    angle: float
    mean: float | None
    error: float | None
    expected: float | None
    record: Record

    def at(self, axis: str) -> float:
        """Coordinate of the point on an axis."""
        return float(getattr(self, axis))

    @property
    def deviation(self) -> float | None:
        """Measured minus theoretical error, in standard errors."""
        if self.mean is None or self.expected is None or not self.error:
            return None
        return (self.mean - self.expected) / self.error


class KernelLine(NamedTuple):
    """One backend with its options."""

    label: str
    backend: str
    points: tuple[KernelPoint, ...]


class KernelPanel(NamedTuple):
    """Lines that differ only by their backend and one axis; `fixed` names the other two."""

    fixed: tuple[tuple[str, float], ...]
    lines: tuple[KernelLine, ...]
    head_dim: int


def kernel_points(records: Iterable[Record]) -> list[KernelPoint]:
    """One point per record with a known position; the last of equal cases counts."""
    latest = {record.case.key: record for record in records}.values()
    found = [_point(record) for record in latest]
    return [point for point in found if point is not None]


def kernel_panels(records: Iterable[Record], axis: str = "size") -> tuple[KernelPanel, ...]:
    """One panel for each value of the other axes; the largest size only."""
    points = kernel_points(records)
    if axis != "size":
        largest = {point.record.case.backend: point.size for point in sorted(points, key=lambda p: p.size)}
        points = [point for point in points if point.size == largest[point.record.case.backend]]
    others = [name for name in AXES if name not in (axis, "size")]
    groups: dict[tuple[tuple[str, float], ...], list[KernelPoint]] = {}
    for point in points:
        fixed = tuple((name, point.at(name)) for name in others)
        groups.setdefault(fixed, []).append(point)
    return tuple(
        KernelPanel(fixed, _lines(group, axis), group[0].record.case.head_dim)
        for fixed, group in groups.items()
    )


def plain_guesses(norm: float, angle: float) -> dict[str, float]:
    """Error over its square of deterministic baselines: the constant 1, and Taylor series of exp(x·y)."""
    # Rounding keeps the cosine of a right angle at zero.
    z = norm**2 * round(math.cos(math.radians(angle)), 15)
    series = {"constant 1": 1.0, "Taylor order 1": 1 + z, "Taylor order 2": 1 + z + z**2 / 2}
    return {name: (value * math.exp(-z) - 1) ** 2 for name, value in series.items()}


def _lines(points: Iterable[KernelPoint], axis: str) -> tuple[KernelLine, ...]:
    groups: dict[str, list[KernelPoint]] = {}
    for point in points:
        groups.setdefault(sized(point.record.case).series, []).append(point)
    return tuple(
        KernelLine(label, group[0].record.case.backend, tuple(sorted(group, key=lambda p: p.at(axis))))
        for label, group in groups.items()
    )


def _point(record: Record) -> KernelPoint | None:
    place, size, value = _PLACE.fullmatch(record.case.inputs), sized(record.case).size, record.kernel_value
    if place is None or size is None or not value:
        return None
    draws = [draw / value**2 for draw in record.kernel_mse_draws or () if draw is not None]
    expected = record.expected_kernel_mse
    return KernelPoint(
        size=size,
        norm=float(place[1]),
        angle=float(place[2]),
        mean=float(np.mean(draws)) if draws else None,
        error=float(np.std(draws, ddof=1) / math.sqrt(len(draws))) if len(draws) > 1 else None,
        expected=None if expected is None else expected / value**2,
        record=record,
    )
