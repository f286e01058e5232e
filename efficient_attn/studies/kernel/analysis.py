"""Kernel-error records as points over features, one panel per norm and angle."""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from efficient_attn.runner.records import Record
from efficient_attn.runner.sizes import sized

_PLACE = re.compile(r"pair\(norm=([\d.e+-]+), angle=([\d.e+-]+)\)")


class KernelPoint(NamedTuple):
    """Mean squared error of one kernel entry over its square.

    Attributes:
        line: Label without the size.
        mean: Mean over draws; None if not measurable.
        error: Standard error of the mean over draws; None for a single draw.
        expected: Theoretical error; None without a closed form.
    """

    line: str
    size: int
    mean: float | None
    error: float | None
    expected: float | None
    record: Record

    @property
    def deviation(self) -> float | None:
        """Measured minus theoretical error, in standard errors."""
        if self.mean is None or self.expected is None or not self.error:
            return None
        return (self.mean - self.expected) / self.error


class KernelPanel(NamedTuple):
    """Points of one norm and angle, by line and in rising order of size."""

    norm: float
    angle: float
    head_dim: int
    lines: dict[str, list[KernelPoint]]

    @property
    def title(self) -> str:
        return f"norm {self.norm:g}, angle {self.angle:g}°; head_dim {self.head_dim}"

    @property
    def points(self) -> list[KernelPoint]:
        return [point for line in self.lines.values() for point in line]


def kernel_points(records: Iterable[Record]) -> list[KernelPoint]:
    """One point per record with a known position; the last of equal cases counts."""
    return [point for panel in kernel_panels(records) for point in panel.points]


def kernel_panels(records: Iterable[Record]) -> list[KernelPanel]:
    """One panel for each norm, angle and head dimension."""
    panels: dict[tuple[float, float, int], dict[str, list[KernelPoint]]] = {}
    for record in {record.case.key: record for record in records}.values():
        place, point = _PLACE.fullmatch(record.case.inputs), _point(record)
        if place is not None and point is not None:
            lines = panels.setdefault((float(place[1]), float(place[2]), record.case.head_dim), {})
            lines.setdefault(point.line, []).append(point)
    for lines in panels.values():
        for line in lines.values():
            line.sort(key=lambda point: point.size)
    return [KernelPanel(*key, lines) for key, lines in panels.items()]


def _point(record: Record) -> KernelPoint | None:
    (line, size), value = sized(record.case), record.kernel_value
    if size is None or not value:
        return None
    draws = [draw / value**2 for draw in record.kernel_mse_draws or () if draw is not None]
    expected = record.expected_kernel_mse
    return KernelPoint(
        line=line,
        size=size,
        mean=float(np.mean(draws)) if draws else None,
        error=float(np.std(draws, ddof=1) / math.sqrt(len(draws))) if len(draws) > 1 else None,
        expected=None if expected is None else expected / value**2,
        record=record,
    )
