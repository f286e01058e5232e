"""Figure 2 of Choromanski et al. 2021 judged by records: errors at pairs of vectors.

Errors are for one direction; m directions have an m-th of them. Errors and their uncertainty depend on a pair
of one length and an angle through |x + y|² and |x − y|² alone.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from efficient_attn.runner.records import Case, Record
from efficient_attn.stats.verdicts import FAILS, HOLDS, NOT_MEASURABLE, Finding, turns_round
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


# Equal directions, and equal features: a direction is one positive feature, but a cosine and a sine.
DIRECTIONS, FEATURES = 1.0, 0.5

_STANDARD_ERRORS = 4.0

# Squared errors of estimates that are exact are rounding below this.
_ROUNDING = 1e-20


def findings(records: Sequence[Record]) -> list[Finding]:
    """A verdict on every claim."""
    return [
        follows_the_lemma(records),
        arbitrarily_better(records),
        better(records, DIRECTIONS, "with as many directions (figure 2)"),
        better(records, FEATURES, "with as many features, two for each direction of trigonometric ones"),
    ]


def follows_the_lemma(records: Sequence[Record]) -> Finding:
    """Every measured error that can be trusted is that of the closed form, within its standard errors."""
    claim = "Mean squared errors are those of lemma 2"
    scores = [
        abs((record.kernel_mse or 0) / record.expected_kernel_mse - 1)
        / predicted_error(place, backend, directions_of(record))
        for backend in (TRIGONOMETRIC, POSITIVE)
        for place, record in errors(records, backend).items()
        if record.expected_kernel_mse and trusted(place, directions_of(record))
    ]
    if not scores:
        return Finding(claim, "no error could be trusted", NOT_MEASURABLE)
    places = errors(records, POSITIVE)
    left = sum(not trusted(place, directions_of(record)) for place, record in places.items())
    text = (
        f"{len(scores)} errors within {max(scores):.1f} predicted standard errors of the closed form; "
        f"{left} of {len(places)} pairs left out, whose |x + y|² is too large to sample"
    )
    return Finding(claim, text, HOLDS if max(scores) <= _STANDARD_ERRORS else FAILS)


def arbitrarily_better(records: Sequence[Record]) -> Finding:
    """At every norm the ratio rises with the angle to above one, and the error is zero for y = −x."""
    claim = "For angles large enough positive features are arbitrarily more accurate (figure 2)"
    found = utilities(records)
    opposite = [
        (record.kernel_mse or 0.0, errors(records, TRIGONOMETRIC)[place].kernel_mse or 0.0)
        for place, record in errors(records, POSITIVE).items()
        if not place.sum_square and place in errors(records, TRIGONOMETRIC)
    ]
    if not found or not opposite:
        return Finding(claim, "no pair with a large angle was measured", NOT_MEASURABLE)
    place, most = max(found.items(), key=lambda item: item[1].value)
    exact = all(below < _ROUNDING < above for below, above in opposite)
    text = (
        f"r up to {most.value:.3g} ({most.low:.3g} to {most.high:.3g}) at {place.angle:g}°, "
        f"l = {place.norm:g}; for y = −x positive features are "
        + ("exact to rounding, trigonometric ones not" if exact else "no more exact than trigonometric ones")
    )
    return Finding(claim, text, HOLDS if exact and most.low > 1 else FAILS)


def better(records: Sequence[Record], level: float, share: str) -> Finding:
    """Where positive features have the smaller error at equal cost, and from which angle on they do."""
    claim = f"Positive features have the smaller error {share}"
    found = utilities(records)
    clear = {place: one for place, one in found.items() if one.low > level or one.high < level}
    if not clear:
        return Finding(claim, "no clear difference was measured", NOT_MEASURABLE)
    wins = [place for place in clear if found[place].value > level]
    angles = _turning(found, level)
    text = f"smaller at {len(wins)} of {len(clear)} pairs with a clear difference"
    if angles:
        text += f"; r = {level:g} at {', '.join(angles)}"
    if len(wins) == len(clear):
        return Finding(claim, text, HOLDS)
    if not wins:
        return Finding(claim, text, FAILS)
    norms = sorted({place.norm for place in clear if place not in wins})
    edges = (turning_angle(norm, level) for norm in (norms[0], norms[-1]))
    low, high = (f"{edge:.0f}°" for edge in edges)
    where = f"{low} for vectors of length {norms[0]:g} (closed form)" + (
        f", below {high} for length {norms[-1]:g}" if len(norms) > 1 else ""
    )
    return Finding(claim, text, turns_round(f"the angle is below {where}"))


def _turning(found: dict[Place, Utility], level: float) -> list[str]:
    """Measured and theoretical crossover angle for every norm."""
    norms = dict.fromkeys(place.norm for place in found)
    angles = {norm: measured_turning_angle(found, norm, level) for norm in norms}
    return [
        f"{angle:.1f}° (l = {norm:g}, closed form {turning_angle(norm, level):.1f}°)"
        for norm, angle in angles.items()
        if angle is not None
    ]
