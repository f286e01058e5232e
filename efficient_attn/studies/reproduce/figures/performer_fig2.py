"""Figure 2 of Choromanski et al. 2021: where positive features have the smaller error.

The error of m directions is an m-th of that of one: ratios are those at as many directions. Errors and their
uncertainty depend on a pair of one length and an angle through |x + y|² and |x − y|² alone.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from efficient_attn.report.figures import Axis, Chart, Plot, Series
from efficient_attn.report.palette import INK
from efficient_attn.report.table import Table
from efficient_attn.runner.record import Case, Record
from efficient_attn.stats.median import Middle
from efficient_attn.stats.verdicts import FAILS, HOLDS, NOT_MEASURABLE, Finding, turns_round
from efficient_attn.studies.kernel.plan import plan as kernel
from efficient_attn.studies.plan import Plan
from efficient_attn.studies.reproduce.figures import Setting
from efficient_attn.theory.kernel import log_utility
from efficient_attn.theory.kurtosis import standard_error

TITLE = "Figure 2: the utility r = MSE_trig / MSE_+ by angle and length"
PAPER = "Choromanski et al. 2021, Rethinking Attention with Performers, https://arxiv.org/abs/2009.14794"

_NORMS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
_ANGLES = (0, 30, 60, 75, 90, 100, 110, 120, 135, 150, 165, 175, 180)
_QUICK_NORMS, _QUICK_ANGLES = (0.5, 1.0), (0, 60, 90, 120, 150, 180)

_SIZE, _DRAWS, _QUICK_SIZE, _QUICK_DRAWS = 2048, 32, 64, 8

_TRIGONOMETRIC, _POSITIVE = "performer-trig", "performer-positive"

# The feature maps of the two.
_MAPS = {_TRIGONOMETRIC: "trigonometric", _POSITIVE: "positive"}

# Lengths that are drawn, with their colours.
_DRAWN = {0.5: "#d98c00", 1.0: "#0072b2", 2.0: "#cc4c88"}

# Largest relative standard error of positive features; beyond it most samples are too low without a sign.
_TRUSTED = 0.2

# Equal directions, and equal features: a direction is one positive feature, but a cosine and a sine.
_DIRECTIONS_EQUAL, _FEATURES_EQUAL = 1.0, 0.5

_STANDARD_ERRORS = 4.0

# Squared errors of estimates that are exact are rounding below this.
_ROUNDING = 1e-20


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


def plan(setting: Setting) -> Plan:
    """The study `kernel` at every pair, with independent directions."""
    return kernel(
        list(_MAPS),
        sizes=_QUICK_SIZE if setting.quick else _SIZE,
        norms=_QUICK_NORMS if setting.quick else _NORMS,
        angles=_QUICK_ANGLES if setting.quick else _ANGLES,
        draws=_QUICK_DRAWS if setting.quick else _DRAWS,
        options={name: {"projection": ["iid"]} for name in _MAPS},
        threads=setting.threads,
    )


def _place_of(case: Case) -> Place:
    norm, angle = re.findall(r"[\d.]+", case.inputs)
    return Place(float(norm), float(angle))


def _pairs(records: Sequence[Record]) -> dict[Place, tuple[Record, Record]]:
    """The errors of trigonometric and positive features at every pair of vectors."""
    found: dict[str, dict[Place, Record]] = {name: {} for name in _MAPS}
    for record in records:
        if record.status == "ok" and record.case.backend in found and record.kernel_mse_draws:
            found[record.case.backend][_place_of(record.case)] = record
    trig, positive = found.values()
    return {place: (trig[place], positive[place]) for place in sorted(trig.keys() & positive.keys())}


def predicted_error(place: Place, backend: str, record: Record) -> float:
    """Relative standard error of a measured error, from the fourth moment."""
    # Former records hold errors of one direction, in blocks of many.
    draws = int(record.case.options.get("directions", len(record.kernel_mse_draws or ())))
    return standard_error(
        _MAPS[backend],
        place.sum_square,
        place.difference_square,
        num_directions=record.num_directions or 1,
        draws=draws,
    )


def _standard_error(record: Record) -> float:
    """Standard error of the mean over draws; infinite for draws without scatter."""
    draws = np.asarray(record.kernel_mse_draws)
    return float(draws.std(ddof=1)) / math.sqrt(len(draws)) or math.inf


def _trusted(pairs: Mapping[Place, tuple[Record, Record]]) -> dict[Place, tuple[Record, Record]]:
    """Pairs where both errors are measured well enough by directions drawn from N(0, I)."""
    return {
        place: both
        for place, both in pairs.items()
        if all(predicted_error(place, one.case.backend, one) <= _TRUSTED for one in both)
    }


def utilities(records: Sequence[Record]) -> dict[Place, Middle]:
    """Ratio and 95 % interval at every pair where both errors can be trusted and neither is zero."""
    found = {}
    for place, both in _trusted(_pairs(records)).items():
        if place.sum_square and place.difference_square:
            above, below = (np.asarray(one.kernel_mse_draws) * (one.num_directions or 1) for one in both)
            ratio = float(above.mean() / below.mean())
            # Standard error of a ratio of means over the same draws.
            error = float((above - ratio * below).std(ddof=1) / below.mean() / math.sqrt(len(below)))
            found[place] = Middle(ratio, ratio - 1.96 * error, ratio + 1.96 * error, len(below))
    return found


def tables(records: Sequence[Record]) -> list[Table]:
    """r by length and angle, measured and in closed form."""
    found = utilities(records)
    places = list(_pairs(records))
    angles = sorted({place.angle for place in places if 0 < place.angle < 180})

    def cell(place: Place) -> str:
        closed = f"({_short(math.exp(log_utility(place.norm, math.radians(place.angle))))})"
        return f"{_short(found[place].median)} {closed}" if place in found else f"– {closed}"

    body = tuple(
        (f"l = {norm:g}", *(cell(Place(norm, angle)) for angle in angles))
        for norm in sorted({place.norm for place in places})
    )
    notes = (
        "Each cell: measured (closed form). r above 1: positive features are better with as many directions, "
        "above 1/2 with as many features.",
        f"– cannot be measured by drawing directions: the predicted standard error of positive features is "
        f"above {_TRUSTED:.0%}, and a typical run would be far too low.",
    )
    return [Table(TITLE, ("length", *(f"{angle:g}°" for angle in angles)), body, notes)]


def _short(value: float) -> str:
    return f"{value:.2g}" if value < 100 else f"{value:.3g}"


def draw(records: Sequence[Record]) -> Plot:
    """r against the angle at three lengths: the closed form, and the measured points."""
    angles = np.linspace(1, 179.5, 400)
    found = utilities(records)
    series = [
        Series("equal directions", (), (_DIRECTIONS_EQUAL,), {"color": INK, "linewidth": 1.0}),
        Series("equal features", (), (_FEATURES_EQUAL,), {"color": INK, "linestyle": (0, (4, 3))}),
    ]
    for norm, colour in _DRAWN.items():
        closed = np.exp(log_utility(norm, np.radians(angles))).tolist()
        series.append(Series("", angles.tolist(), closed, {"color": colour, "linewidth": 1.5}, entry=""))
        line = {place.angle: one for place, one in found.items() if place.norm == norm}
        spot = {"color": colour, "marker": "o", "markersize": 5, "linestyle": "none"}
        values, low, high = ([one[edge] for one in line.values()] for edge in range(3))
        series.append(Series(f"l = {norm:g}, measured", list(line), values, spot, low, high, bars=True))
    chart = Chart(
        Axis("angle between x and y", ticks={a: f"{a:g}°" for a in (0.0, 45.0, 90.0, 135.0, 180.0)}),
        Axis("r = MSE_trig / MSE_+", "log", "{:.0e}".format, limits=(1e-6, 1e9)),
        tuple(series),
        "Above a horizontal line positive features have the smaller error",
    )
    return Plot("Positive against trigonometric features", "lines: the closed form", ((chart,),))


def findings(records: Sequence[Record]) -> list[Finding]:
    """A verdict on every claim."""
    return [
        _follows_the_lemma(records),
        _arbitrarily_better(records),
        _better(records, _DIRECTIONS_EQUAL, "with as many directions (figure 2)"),
        _better(
            records, _FEATURES_EQUAL, "with as many features, two for each direction of trigonometric ones"
        ),
    ]


def _follows_the_lemma(records: Sequence[Record]) -> Finding:
    """Every measured error that can be trusted is that of the closed form, within its standard errors."""
    claim = "Mean squared errors are those of lemma 2"
    pairs = _pairs(records)
    known = _trusted(pairs)
    scores = [
        abs((one.kernel_mse or 0) - one.expected_kernel_mse) / _standard_error(one)
        for both in known.values()
        for one in both
        if (one.expected_kernel_mse or 0) > _ROUNDING
    ]
    if not scores:
        return Finding(claim, "no error could be trusted", NOT_MEASURABLE)
    text = (
        f"{len(scores)} errors within {max(scores):.1f} standard errors of the closed form; "
        f"{len(pairs) - len(known)} of {len(pairs)} pairs left out, whose |x + y|² is too large to sample"
    )
    return Finding(claim, text, HOLDS if max(scores) <= _STANDARD_ERRORS else FAILS)


def _arbitrarily_better(records: Sequence[Record]) -> Finding:
    """At every norm the ratio rises with the angle to above one, and the error is zero for y = −x."""
    claim = "For angles large enough positive features are arbitrarily more accurate (figure 2)"
    found = utilities(records)
    opposite = [both for place, both in _pairs(records).items() if not place.sum_square]
    if not found or not opposite:
        return Finding(claim, "no pair with a large angle was measured", NOT_MEASURABLE)
    place, most = max(found.items(), key=lambda item: item[1].median)
    exact = all(
        (positive.kernel_mse or 0.0) < _ROUNDING < (trig.kernel_mse or 0.0) for trig, positive in opposite
    )
    text = (
        f"r up to {most.median:.3g} ({most.low:.3g} to {most.high:.3g}) at {place.angle:g}°, "
        f"l = {place.norm:g}; for y = −x positive features are "
        + ("exact to rounding, trigonometric ones not" if exact else "no more exact than trigonometric ones")
    )
    return Finding(claim, text, HOLDS if exact and most.low > 1 else FAILS)


def _better(records: Sequence[Record], level: float, share: str) -> Finding:
    """Where positive features have the smaller error at equal cost."""
    claim = f"Positive features have the smaller error {share}"
    found = utilities(records)
    clear = {place: one.low > level for place, one in found.items() if one.low > level or one.high < level}
    # Places are in ascending order: the largest angle of a length comes last.
    lost = {place.norm: place.angle for place, wins in clear.items() if not wins}
    text = f"smaller at {sum(clear.values())} of {len(clear)} pairs with a clear difference"
    if not clear or not any(clear.values()):
        return Finding(claim, text, FAILS if clear else NOT_MEASURABLE)
    where = ", ".join(f"{angle:g}° for vectors of length {norm:g}" for norm, angle in lost.items())
    return Finding(claim, text, turns_round(f"the angle is at most {where}") if lost else HOLDS)
