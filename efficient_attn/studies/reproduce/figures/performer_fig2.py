"""Figure 2 of Choromanski et al. 2021: where positive features have the smaller error.

Errors are for one direction; m directions have an m-th of them. Errors and their uncertainty depend on a pair
of one length and an angle through |x + y|² and |x − y|² alone.
"""

import itertools
import math
import re
from collections.abc import Sequence
from functools import lru_cache, partial
from statistics import fmean
from typing import NamedTuple

import numpy as np

from efficient_attn.report.figures import Axis, Chart, Plot, Series
from efficient_attn.report.palette import INK
from efficient_attn.report.table import Table
from efficient_attn.runner.record import Case, Record
from efficient_attn.runner.worker import answer
from efficient_attn.stats.verdicts import FAILS, HOLDS, NOT_MEASURABLE, Finding, turns_round
from efficient_attn.studies.plan import Plan, Point
from efficient_attn.studies.reproduce.figures import Setting
from efficient_attn.theory.kernel import (
    log_mean_squared_error,
    log_positive_error,
    log_trigonometric_error,
    log_utility,
)
from efficient_attn.theory.kurtosis import standard_error

TITLE = "Figure 2: the utility r = MSE_trig / MSE_+ by angle and length"
PAPER = "Choromanski et al. 2021, Rethinking Attention with Performers, https://arxiv.org/abs/2009.14794"

_NORMS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
_ANGLES = (0, 30, 60, 75, 90, 100, 110, 120, 135, 150, 165, 175, 180)
_QUICK_NORMS, _QUICK_ANGLES = (0.5, 1.0), (0, 60, 90, 120, 150, 180)

# The errors of independent directions do not depend on the dimension; the figure 4 of the paper has this one.
_HEAD_DIM = 16
_BLOCKS, _DIRECTIONS, _QUICK_DIRECTIONS = 20, 50_000, 2_000

_TRIGONOMETRIC, _POSITIVE = "performer-trig", "performer-positive"

# The feature maps of the two.
_MAPS = {_TRIGONOMETRIC: "trigonometric", _POSITIVE: "positive"}

# Lengths that are drawn, with their colours.
_DRAWN = {0.5: "#d98c00", 1.0: "#0072b2", 2.0: "#cc4c88"}

# Largest relative standard error of positive features; beyond it most samples are too low without a sign.
_TRUSTED = 0.05

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


class Utility(NamedTuple):
    """The ratio of mean squared errors, trigonometric over positive, with its 95 % interval."""

    value: float
    low: float
    high: float


def plan(setting: Setting) -> Plan:
    """The mean squared error of one direction at every pair, norm by norm, in float64."""
    norms, angles = (_QUICK_NORMS, _QUICK_ANGLES) if setting.quick else (_NORMS, _ANGLES)
    block = _QUICK_DIRECTIONS if setting.quick else _DIRECTIONS
    points = []
    for norm in norms:
        places = tuple(Place(norm, float(angle)) for angle in angles)
        for place, name in itertools.product(places, _MAPS):
            case = case_of(place, name, block, setting.threads)
            measure = partial(answer, case, partial(_measured, case, places, block))
            # The first point of a norm draws the directions of all.
            first = (place, name) == (places[0], _TRIGONOMETRIC)
            label = f"{name}, length {norm:g}, {place.angle:g}°"
            points.append(Point(case=case, measure=measure, label=label, series=first))
    return Plan(points=points)


def case_of(place: Place, backend: str, block: int, threads: int) -> Case:
    """The case of a pair and a map."""
    return Case(
        kind="error",
        backend=backend,
        label=backend,
        options={"projection": "iid", "directions": block * _BLOCKS},
        of="kernel",
        num_heads=1,
        head_dim=_HEAD_DIM,
        tokens=1,
        dtype="float64",
        device="cpu",
        threads=threads,
        inputs=f"pair(norm={place.norm:g}, angle={place.angle:g})",
    )


def expected(place: Place, backend: str) -> float:
    """The closed form of the error."""
    if backend == _POSITIVE:
        log_error = log_positive_error(place.sum_square)
    else:
        log_error = log_trigonometric_error(place.difference_square)
    product = place.norm**2 * math.cos(math.radians(place.angle))
    return float(np.exp(log_mean_squared_error(log_error, product)))


def _measured(case: Case, places: tuple[Place, ...], block: int) -> Record:
    """The error at one pair, a mean for each block of directions."""
    place = _place_of(case)
    found = _draws(places, block)[place, case.backend]
    return Record(
        case=case,
        num_directions=1,
        expected_kernel_mse=expected(place, case.backend),
        kernel_mse=fmean(found),
        kernel_mse_draws=found,
    )


@lru_cache(maxsize=1)
def _draws(places: tuple[Place, ...], block: int) -> dict[tuple[Place, str], tuple[float, ...]]:
    """The errors at all pairs by both maps, a mean for each block of directions."""
    import torch

    from efficient_attn.ops.linear.directions import draw_directions
    from efficient_attn.ops.linear.features import MAPS

    turn = torch.tensor([math.radians(place.angle) for place in places], dtype=torch.float64)
    norms = torch.tensor([place.norm for place in places], dtype=torch.float64)
    x, y = torch.zeros(2, len(places), _HEAD_DIM, dtype=torch.float64)
    x[:, 0], y[:, 0], y[:, 1] = norms, norms * turn.cos(), norms * turn.sin()
    exact = (x * y).sum(dim=-1, keepdim=True).exp()
    draws: dict[tuple[Place, str], list[float]] = {}
    for seed in range(_BLOCKS):
        directions = draw_directions("iid", block, _HEAD_DIM, seed=seed)
        for name, kind in _MAPS.items():
            one, other = (MAPS[kind].features(vectors, directions) for vectors in (x, y))
            estimates = (one.log_scale + other.log_scale).exp()
            if one.values is not None and other.values is not None:
                products = (one.values * other.values).unflatten(-1, (2, block)).sum(dim=-2)
                estimates = estimates * products
            # The map divides by the number of directions; each alone is an estimate.
            errors = (block * estimates - exact).square().mean(dim=-1)
            for place, error in zip(places, errors.tolist(), strict=True):
                draws.setdefault((place, name), []).append(error)
    return {key: tuple(found) for key, found in draws.items()}


def _place_of(case: Case) -> Place:
    norm, angle = re.findall(r"[\d.]+", case.inputs)
    return Place(float(norm), float(angle))


def _errors(records: Sequence[Record], backend: str) -> dict[Place, Record]:
    """Records of one feature map, by pair."""
    return {
        _place_of(record.case): record
        for record in records
        if record.status == "ok" and record.case.backend == backend
    }


def predicted_error(place: Place, backend: str, directions: int) -> float:
    """Relative standard error of an error measured with `directions` directions, from the fourth moment."""
    squares = place.sum_square, place.difference_square
    return standard_error(_MAPS[backend], *squares, num_directions=1, draws=directions)


def _trusted(place: Place, record: Record) -> bool:
    """Whether both errors are measured well enough by directions drawn from N(0, I)."""
    return all(predicted_error(place, name, _directions(record)) <= _TRUSTED for name in _MAPS)


def _directions(record: Record) -> int:
    return int(record.case.options["directions"])


def utilities(records: Sequence[Record]) -> dict[Place, Utility]:
    """The measured ratio at every pair where both errors can be trusted and neither is zero."""
    trig, positive = (_errors(records, name) for name in _MAPS)
    found = {}
    for place in sorted(trig.keys() & positive.keys()):
        if _trusted(place, trig[place]) and place.sum_square and place.difference_square:
            above, below = (np.asarray(one[place].kernel_mse_draws) for one in (trig, positive))
            ratio = float(above.mean() / below.mean())
            # Standard error of a ratio of means over the same blocks of directions.
            error = float((above - ratio * below).std(ddof=1) / below.mean() / math.sqrt(len(below)))
            found[place] = Utility(ratio, ratio - 1.96 * error, ratio + 1.96 * error)
    return found


def tables(records: Sequence[Record]) -> list[Table]:
    """r by length and angle, measured and in closed form."""
    found = utilities(records)
    places = sorted(_errors(records, _POSITIVE))
    angles = sorted({place.angle for place in places if 0 < place.angle < 180})

    def cell(place: Place) -> str:
        closed = f"({_short(math.exp(log_utility(place.norm, math.radians(place.angle))))})"
        return f"{_short(found[place].value)} {closed}" if place in found else f"– {closed}"

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
    scores = [
        abs((record.kernel_mse or 0) / record.expected_kernel_mse - 1)
        / predicted_error(place, backend, _directions(record))
        for backend in _MAPS
        for place, record in _errors(records, backend).items()
        if record.expected_kernel_mse and _trusted(place, record)
    ]
    if not scores:
        return Finding(claim, "no error could be trusted", NOT_MEASURABLE)
    places = _errors(records, _POSITIVE)
    left = sum(not _trusted(place, record) for place, record in places.items())
    text = (
        f"{len(scores)} errors within {max(scores):.1f} predicted standard errors of the closed form; "
        f"{left} of {len(places)} pairs left out, whose |x + y|² is too large to sample"
    )
    return Finding(claim, text, HOLDS if max(scores) <= _STANDARD_ERRORS else FAILS)


def _arbitrarily_better(records: Sequence[Record]) -> Finding:
    """At every norm the ratio rises with the angle to above one, and the error is zero for y = −x."""
    claim = "For angles large enough positive features are arbitrarily more accurate (figure 2)"
    found = utilities(records)
    trig, positive = (_errors(records, name) for name in _MAPS)
    opposite = [place for place in trig.keys() & positive.keys() if not place.sum_square]
    if not found or not opposite:
        return Finding(claim, "no pair with a large angle was measured", NOT_MEASURABLE)
    place, most = max(found.items(), key=lambda item: item[1].value)
    exact = all(
        (positive[one].kernel_mse or 0.0) < _ROUNDING < (trig[one].kernel_mse or 0.0) for one in opposite
    )
    text = (
        f"r up to {most.value:.3g} ({most.low:.3g} to {most.high:.3g}) at {place.angle:g}°, "
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
