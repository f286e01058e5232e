"""Figure 2 of Choromanski et al. 2021 as data: pairs of vectors and their measured errors.

Errors are for one direction; m directions have an m-th of them. Errors and their uncertainty depend on a pair
of one length and an angle through |x + y|² and |x − y|² alone.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from efficient_attn.sweep.records import Case, Record
from efficient_attn.theory.kernel import log_utility
from efficient_attn.theory.kurtosis import standard_error

TRIGONOMETRIC, POSITIVE = "performer-trig", "performer-positive"

# The feature maps of the two.
KINDS = {TRIGONOMETRIC: "trigonometric", POSITIVE: "positive"}

# Largest relative standard error of positive features; beyond it most samples are too low without a sign.
TRUSTED = 0.05


class Place(NamedTuple):
    """A pair with |x| = |y| = norm and an angle in degrees between them."""

    norm: float
    angle: float

    @property
    def sum_square(self) -> float:
        """|x + y|²; the halved angle keeps it exact where it vanishes."""
        return 4 * self.norm**2 * math.cos(math.radians(self.angle) / 2) ** 2 * (self.angle != 180)

    @property
    def difference_square(self) -> float:
        """|x − y|²."""
        return 4 * self.norm**2 * math.sin(math.radians(self.angle) / 2) ** 2

    @property
    def inputs(self) -> str:
        """Name of the inputs in records."""
        return f"pair(norm={self.norm:g}, angle={self.angle:g})"


class Utility(NamedTuple):
    """The ratio of mean squared errors, trigonometric over positive, with its 95 % interval."""

    value: float
    low: float
    high: float


def place_of(case: Case) -> Place:
    """The pair that a case is about."""
    norm, angle = re.findall(r"[\d.]+", case.inputs)
    return Place(float(norm), float(angle))


def errors(records: Sequence[Record], backend: str) -> dict[Place, Record]:
    """Records of one feature map, by pair."""
    return {
        place_of(record.case): record
        for record in records
        if record.status == "ok" and record.case.backend == backend
    }


def predicted_error(place: Place, backend: str, directions: int) -> float:
    """Relative standard error of an error measured with `directions` directions, from the fourth moment."""
    squares = place.sum_square, place.difference_square
    return standard_error(KINDS[backend], *squares, num_directions=1, draws=directions)


def trusted(place: Place, directions: int) -> bool:
    """Whether both errors are measured well enough by directions drawn from N(0, I)."""
    return all(predicted_error(place, name, directions) <= TRUSTED for name in (TRIGONOMETRIC, POSITIVE))


def directions_of(record: Record) -> int:
    """How many directions an error was averaged over."""
    return int(record.case.options["directions"])


def utilities(records: Sequence[Record]) -> dict[Place, Utility]:
    """The measured ratio at every pair where both errors can be trusted and neither is zero."""
    trig, positive = (errors(records, name) for name in (TRIGONOMETRIC, POSITIVE))
    found = {}
    for place in trig.keys() & positive.keys():
        above, below = (np.asarray(one[place].kernel_mse_draws) for one in (trig, positive))
        known = trusted(place, directions_of(trig[place]))
        if not known or not place.sum_square or not place.difference_square:
            continue
        ratio = float(above.mean() / below.mean())
        # Standard error of a ratio of means over the same blocks of directions.
        error = float((above - ratio * below).std(ddof=1) / below.mean() / math.sqrt(len(below)))
        found[place] = Utility(ratio, ratio - 1.96 * error, ratio + 1.96 * error)
    return dict(sorted(found.items()))


def turning_angle(norm: float, level: float) -> float:
    """The angle in degrees where the closed form passes a level."""
    angles = np.linspace(1e-3, 180 - 1e-3, 200_001)
    return float(np.interp(math.log(level), log_utility(norm, np.radians(angles)), angles))


def measured_turning_angle(found: dict[Place, Utility], norm: float, level: float) -> float | None:
    """The same between neighbouring measured pairs; None where no two enclose it."""
    line = [(place.angle, utility.value) for place, utility in found.items() if place.norm == norm]
    logs = [math.log(value / level) for _, value in line]
    if len(line) < 2 or not logs[0] < 0 < logs[-1]:
        return None
    return float(np.interp(0.0, logs, [angle for angle, _ in line]))
