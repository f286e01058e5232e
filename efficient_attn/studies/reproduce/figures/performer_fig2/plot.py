"""The plane of angle and length of figure 2 of Choromanski et al. 2021, and three cuts through it."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from efficient_attn.report.figures import Axis, Chart, Plot, Series
from efficient_attn.report.palette import INK
from efficient_attn.runner.records import Record
from efficient_attn.studies.reproduce.figures.performer_fig2.claims import turning_angle, utilities
from efficient_attn.theory.kernel import log_utility

_CUTS = {0.5: "#d98c00", 1.0: "#0072b2", 2.0: "#cc4c88"}
_LEVELS = {1.0: ("equal directions", "-"), 0.5: ("equal features", (0, (4, 3)))}

# The closed form is drawn to the paper's edges, in decades from 1e-4 to 1e4.
_DECADES = 4
_SHADES = {"cmap": "RdBu", "vmin": -_DECADES, "vmax": _DECADES}


def draw(records: Sequence[Record]) -> Plot:
    """The paper's plane with the closed form and the measured points, and three cuts through it."""
    turns = {-math.pi: "−π", -math.pi / 2: "−π/2", 0.0: "0", math.pi / 2: "π/2", math.pi: "π"}
    plane = Chart(
        Axis("angle φ between x and y", ticks=turns),
        Axis("length l = |x| = |y|"),
        title="Ratio r = MSE_trig / MSE_+; blue: positive features are better",
        notes=("circles: measured; line r = 1, dashed r = 1/2 (equal features); dots: too few samples",),
        height=3.2,
        draw=partial(_plane, records),
    )
    degrees = {angle: f"{angle:g}°" for angle in (0.0, 45.0, 90.0, 135.0, 180.0)}
    cuts = Chart(
        Axis("angle between x and y", ticks=degrees, limits=(0, 180)),
        Axis("r = MSE_trig / MSE_+", "log", "{:.0e}".format, limits=(1e-6, 1e8)),
        tuple(_cuts(records)),
        "Three cuts: lines are the closed form",
    )
    return Plot("Positive against trigonometric features", "", ((plane,), (cuts,)))


def _plane(records: Sequence[Record], ax: Any) -> None:
    angle, norm = np.meshgrid(np.linspace(-math.pi, math.pi, 361), np.linspace(-2, 2, 241))
    with np.errstate(divide="ignore", invalid="ignore"):
        decades = log_utility(np.abs(norm), np.abs(angle)) / math.log(10)
    shown = ax.pcolormesh(angle, norm, np.clip(decades, -_DECADES, _DECADES), **_SHADES, rasterized=True)
    bar = ax.figure.colorbar(shown, ax=ax, extend="both", pad=0.01)
    ticks = range(-_DECADES, _DECADES + 1, 2)
    bar.set_ticks(list(ticks), labels=[f"{10.0**tick:g}" for tick in ticks])
    for level, (_, stroke) in _LEVELS.items():
        lengths = np.linspace(0.03, 2, 200)
        edge = np.radians([turning_angle(length, level) for length in lengths])
        for side in (-1, 1):
            for up in (-1, 1):
                ax.plot(side * edge, up * lengths, color=INK, linestyle=stroke, linewidth=1.2)
    # Where |x + y|² is too large, in every quadrant.
    if records:
        limit = max((p.sum_square for p in utilities(records)), default=0.0)
        beyond = 4 * norm**2 * np.cos(angle / 2) ** 2
        ax.contourf(angle, norm, beyond, levels=[limit, np.inf], colors="none", hatches=["...."])
    for place, utility in utilities(records).items():
        spot = {"marker": "o", "s": 28, "edgecolor": INK, "linewidth": 0.8, "zorder": 4, **_SHADES}
        ax.scatter([math.radians(place.angle)], [place.norm], c=[math.log10(utility.value)], **spot)
    ax.set_yticks([-2, -1, 0, 1, 2])
    ax.grid(visible=False)


def _cuts(records: Sequence[Record]) -> Iterator[Series]:
    angles = np.linspace(1, 179.5, 400)
    found = utilities(records)
    for level, (name, stroke) in _LEVELS.items():
        yield Series(name, (), (level,), {"color": INK, "linewidth": 1.0, "linestyle": stroke})
    for norm, colour in _CUTS.items():
        expected = np.exp(log_utility(norm, np.radians(angles)))
        yield Series("", angles.tolist(), expected.tolist(), {"color": colour, "linewidth": 1.5}, entry="")
        line = {place.angle: one for place, one in found.items() if place.norm == norm}
        spot = {"color": colour, "marker": "o", "markersize": 5, "linestyle": "none"}
        low = [max(one.low, one.value / 10) for one in line.values()]
        high = [one.high for one in line.values()]
        values = [one.value for one in line.values()]
        yield Series(f"l = {norm:g}, measured", list(line), values, spot, low, high, bars=True)
