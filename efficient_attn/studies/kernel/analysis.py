"""Kernel-error records as errors relative to the entry's square, next to theory."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from efficient_attn.runner.records import Record
from efficient_attn.runner.sizes import sized
from efficient_attn.studies.mse.analysis import Panel, panels

# Squared errors of estimates that are exact are rounding below this.
ROUNDING = 1e-20


class Entry(NamedTuple):
    """Mean squared error of one kernel entry over its square.

    Attributes:
        mean: Mean over draws; None if not measurable.
        error: Standard error of the mean over draws; None for a single draw.
        expected: Theoretical error; None without a closed form.
    """

    size: int
    mean: float | None
    error: float | None
    expected: float | None

    @property
    def deviation(self) -> float | None:
        """Measured minus theoretical error, in standard errors."""
        if self.mean is None or self.expected is None or not self.error or self.expected < ROUNDING:
            return None
        return (self.mean - self.expected) / self.error


def entry_panels(records: Iterable[Record]) -> tuple[Panel, ...]:
    """One panel for each norm and angle, without records that have no size or no exact entry."""
    known = [record for record in records if record.kernel_value and sized(record.case).size is not None]
    return panels(known, "kernel_value")


def entries(panel: Panel) -> dict[str, list[Entry]]:
    """Entries by label, in rising order of size."""
    return {curve.label: [_entry(point.record) for point in curve.points] for curve in panel.curves}


def _entry(record: Record) -> Entry:
    square = (record.kernel_value or math.nan) ** 2
    draws = [draw / square for draw in record.kernel_mse_draws or () if draw is not None]
    expected = record.expected_kernel_mse
    return Entry(
        size=sized(record.case).size or 0,
        mean=float(np.mean(draws)) if draws else None,
        error=float(np.std(draws, ddof=1) / math.sqrt(len(draws))) if len(draws) > 1 else None,
        expected=None if expected is None else expected / square,
    )
