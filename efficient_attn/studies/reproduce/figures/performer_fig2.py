"""Figure 2 of Choromanski et al. 2021: where positive features have the smaller error.

The error of m directions is an m-th of that of one: ratios are those at as many directions.
"""

import math
import re
from collections.abc import Sequence

import numpy as np

from efficient_attn.report.figures import Axis, Chart, Plot, Series
from efficient_attn.report.palette import INK
from efficient_attn.report.table import Table
from efficient_attn.runner.record import Record, replace
from efficient_attn.stats.median import Middle
from efficient_attn.stats.verdicts import FAILS, HOLDS, NOT_MEASURABLE, Finding, turns_round
from efficient_attn.studies.kernel.analysis import entries, entry_panels
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

_BACKENDS = ("performer-trig", "performer-positive")

# Lengths that are drawn, with their colours.
_DRAWN = {0.5: "#d98c00", 1.0: "#0072b2", 2.0: "#cc4c88"}

# Equal directions, and equal features: a direction is one positive feature, but a cosine and a sine.
_DIRECTIONS_EQUAL, _FEATURES_EQUAL = 1.0, 0.5

_STANDARD_ERRORS = 4.0

# Largest relative standard error of former records, which hold directions that sample too few rare ones.
_TRUSTED = 0.2

# Ratio and 95 % interval by length and angle.
Utilities = dict[tuple[float, float], Middle]


def plan(setting: Setting) -> Plan:
    """The study `kernel` at every pair, with independent directions."""
    return kernel(
        list(_BACKENDS),
        sizes=_QUICK_SIZE if setting.quick else _SIZE,
        norms=_QUICK_NORMS if setting.quick else _NORMS,
        angles=_QUICK_ANGLES if setting.quick else _ANGLES,
        draws=_QUICK_DRAWS if setting.quick else _DRAWS,
        options={name: {"projection": ["iid"]} for name in _BACKENDS},
        threads=setting.threads,
    )


def _places(records: Sequence[Record]) -> dict[tuple[float, float], dict[str, Record]]:
    """Records by length and angle, ascending, and backend."""
    found: dict[tuple[float, float], dict[str, Record]] = {}
    for record in records:
        norm, angle = map(float, re.findall(r"[\d.]+", record.case.inputs))
        if _predicted_error(record, norm, math.radians(angle)) > _TRUSTED:
            record = replace(record, kernel_mse_draws=None)
        found.setdefault((norm, angle), {})[record.case.backend] = record
    return dict(sorted(found.items()))


def _predicted_error(record: Record, norm: float, angle: float) -> float:
    """Relative standard error of a former record; those of today are skipped where it is too large."""
    draws = record.case.options.get("directions")
    if not isinstance(draws, int):
        return 0.0
    kind = record.case.backend.removeprefix("performer-").replace("trig", "trigonometric")
    square = 4 * norm**2
    both = square * math.cos(angle / 2) ** 2, square * math.sin(angle / 2) ** 2
    return standard_error(kind, *both, num_directions=1, draws=draws)


def utilities(records: Sequence[Record]) -> Utilities:
    """r at every pair where both errors were measured and neither is zero."""
    found = {}
    for place, both in _places(records).items():
        measured = [both[name] for name in _BACKENDS if name in both and both[name].kernel_mse_draws]
        if len(measured) == 2 and 0 < place[1] < 180:
            above, below = (np.array(one.kernel_mse_draws) * (one.num_directions or 1) for one in measured)
            ratio = float(above.mean() / below.mean())
            # Standard error of a ratio of means over the same draws.
            error = float((above - ratio * below).std(ddof=1) / below.mean() / math.sqrt(len(below)))
            found[place] = Middle(ratio, ratio - 1.96 * error, ratio + 1.96 * error, len(below))
    return found


def tables(records: Sequence[Record]) -> list[Table]:
    """r by length and angle, measured and in closed form."""
    found, places = utilities(records), _places(records)
    angles = sorted({angle for _, angle in places if 0 < angle < 180})

    def cell(norm: float, angle: float) -> str:
        measured = _short(found[norm, angle].median) if (norm, angle) in found else "–"
        return f"{measured} ({_short(math.exp(log_utility(norm, math.radians(angle))))})"

    body = tuple(
        (f"l = {norm:g}", *(cell(norm, angle) for angle in angles))
        for norm in dict.fromkeys(norm for norm, _ in places)
    )
    notes = (
        "Each cell: measured (closed form). r above 1: positive features are better with as many directions, "
        "above 1/2 with as many features.",
        "– cannot be measured by drawing directions: a typical run would be far too low.",
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
    for length, colour in _DRAWN.items():
        closed = np.exp(log_utility(length, np.radians(angles))).tolist()
        series.append(Series("", angles.tolist(), closed, {"color": colour, "linewidth": 1.5}, entry=""))
        line = {angle: one for (norm, angle), one in found.items() if norm == length}
        spot = {"color": colour, "marker": "o", "markersize": 5, "linestyle": "none"}
        values, low, high = ([one[edge] for one in line.values()] for edge in range(3))
        series.append(Series(f"l = {length:g}, measured", list(line), values, spot, low, high, bars=True))
    chart = Chart(
        Axis("angle between x and y", ticks={a: f"{a:g}°" for a in (0.0, 45.0, 90.0, 135.0, 180.0)}),
        Axis("r = MSE_trig / MSE_+", "log", "{:.0e}".format, limits=(1e-6, 1e9)),
        tuple(series),
        "Above a horizontal line positive features have the smaller error",
    )
    return Plot("Positive against trigonometric features", "lines: the closed form", ((chart,),))


def findings(records: Sequence[Record]) -> list[Finding]:
    """A verdict on every claim."""
    found = utilities(records)
    features = "with as many features, two for each direction of trigonometric ones"
    return [
        _follows_the_lemma(records),
        _arbitrarily_better(found),
        _better(found, _DIRECTIONS_EQUAL, "with as many directions (figure 2)"),
        _better(found, _FEATURES_EQUAL, features),
    ]


def _follows_the_lemma(records: Sequence[Record]) -> Finding:
    """Every measured error is that of the closed form, within its standard errors."""
    claim = "Mean squared errors are those of lemma 2"
    measured = [one for panel in entry_panels(records) for line in entries(panel).values() for one in line]
    scores = [abs(one.deviation) for one in measured if one.deviation is not None]
    if not scores:
        return Finding(claim, "no error was measured", NOT_MEASURABLE)
    text = f"{len(scores)} errors within {max(scores):.1f} standard errors of the closed form"
    return Finding(claim, text, HOLDS if max(scores) <= _STANDARD_ERRORS else FAILS)


def _arbitrarily_better(found: Utilities) -> Finding:
    """The largest ratio is above one."""
    claim = "For angles large enough positive features are arbitrarily more accurate (figure 2)"
    if not found:
        return Finding(claim, "no pair was measured", NOT_MEASURABLE)
    (norm, angle), most = max(found.items(), key=lambda item: item[1].median)
    text = f"r up to {most.median:.3g} ({most.low:.3g} to {most.high:.3g}) at {angle:g}°, l = {norm:g}"
    return Finding(claim, text, HOLDS if most.low > 1 else FAILS)


def _better(found: Utilities, level: float, share: str) -> Finding:
    """Where positive features have the smaller error at equal cost."""
    claim = f"Positive features have the smaller error {share}"
    clear = {place: one.low > level for place, one in found.items() if one.low > level or one.high < level}
    # Places are in ascending order: the largest angle of a length comes last.
    lost = {norm: angle for (norm, angle), wins in clear.items() if not wins}
    text = f"smaller at {sum(clear.values())} of {len(clear)} pairs with a clear difference"
    if not any(clear.values()):
        return Finding(claim, text, FAILS if clear else NOT_MEASURABLE)
    where = ", ".join(f"{angle:g}° for vectors of length {norm:g}" for norm, angle in lost.items())
    return Finding(claim, text, turns_round(f"the angle is at most {where}") if lost else HOLDS)
