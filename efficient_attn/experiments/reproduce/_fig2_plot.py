"""The plane of angle and length of figure 2 of Choromanski et al. 2021, and three cuts through it."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from efficient_attn.experiments.reproduce._fig2 import turning_angle, utilities
from efficient_attn.report.palette import GRID, INK, MUTED
from efficient_attn.sweep.records import Record
from efficient_attn.theory.kernel import log_utility

_CUTS = {0.5: "#d98c00", 1.0: "#0072b2", 2.0: "#cc4c88"}

# The closed form is drawn to the paper's edges, in decades from 1e-4 to 1e4.
_DECADES = 4


def draw(records: Sequence[Record]) -> Any:
    """The paper's plane with the closed form and what was measured, and three cuts through it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.4, 5.2), layout="constrained")
    plane, cuts = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _plane(figure, plane, records)
    _cuts(cuts, records)
    return plane


def _plane(figure: Any, ax: Any, records: Sequence[Record]) -> None:
    angle, norm = np.meshgrid(np.linspace(-math.pi, math.pi, 361), np.linspace(-2, 2, 241))
    with np.errstate(divide="ignore", invalid="ignore"):
        decades = log_utility(np.abs(norm), np.abs(angle)) / math.log(10)
    shades = {"cmap": "RdBu", "vmin": -_DECADES, "vmax": _DECADES}
    shown = ax.pcolormesh(angle, norm, np.clip(decades, -_DECADES, _DECADES), **shades, rasterized=True)
    bar = figure.colorbar(shown, ax=ax, extend="both", pad=0.01)
    bar.ax.set_title("r", fontsize=10)
    ticks = range(-_DECADES, _DECADES + 1, 2)
    bar.set_ticks(list(ticks), labels=[f"{10.0**tick:g}" for tick in ticks])
    for level, stroke in ((1.0, "-"), (0.5, (0, (4, 3)))):
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
        colour = math.log10(utility.value)
        spot = {"marker": "o", "s": 42, "edgecolor": INK, "linewidth": 0.8, "zorder": 4, **shades}
        ax.scatter([math.radians(place.angle)], [place.norm], c=[colour], **spot)
    ax.set_xticks([-math.pi, -math.pi / 2, 0, math.pi / 2, math.pi], ["−π", "−π/2", "0", "π/2", "π"])
    ax.set_yticks([-2, -1, 0, 1, 2])
    _dress(ax, "Blue: positive features are better", "angle φ between x and y", "length l = |x| = |y|")
    ax.text(
        0,
        1.015,
        "circles: measured; line r = 1, dashed r = 1/2 (equal features); dots: sampling cannot tell",
        transform=ax.transAxes,
        fontsize=8.5,
        color=MUTED,
    )


def _cuts(ax: Any, records: Sequence[Record]) -> None:
    angles = np.linspace(1, 179.5, 400)
    found = utilities(records)
    for norm, colour in _CUTS.items():
        ax.plot(angles, np.exp(log_utility(norm, np.radians(angles))), color=colour, linewidth=1.5)
        line = {place.angle: one for place, one in found.items() if place.norm == norm}
        values = [one.value for one in line.values()]
        spread = [
            [one.value - max(one.low, one.value / 10) for one in line.values()],
            [one.high - one.value for one in line.values()],
        ]
        spot = {"fmt": "o", "color": colour, "markersize": 5, "capsize": 2.5}
        ax.errorbar(list(line), values, yerr=spread, **spot, label=f"l = {norm:g}, measured")
    for level, text in ((1.0, "equal directions"), (0.5, "equal features")):
        stroke = "-" if level == 1 else (0, (4, 3))
        ax.axhline(level, color=INK, linewidth=1, linestyle=stroke)
        ax.annotate(text, (4, level), fontsize=8.5, color=INK, va="bottom" if level == 1 else "top")
    ax.set_yscale("log")
    ax.set_ylim(1e-6, 1e8)
    ax.set_xlim(0, 180)
    ax.set_xticks([0, 45, 90, 135, 180], ["0", "45°", "90°", "135°", "180°"])
    ax.grid(axis="y", color=GRID, linewidth=0.8)
    ax.legend(loc="upper left", frameon=False, fontsize=9)
    _dress(ax, "Three cuts: lines are the closed form", "angle between x and y", "r = MSE_trig / MSE_+")


def _dress(ax: Any, title: str, x: str, y: str) -> None:
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.set_title(f"{title}\n", loc="left", fontsize=11, fontweight="bold", color=INK)
    ax.set_xlabel(x, color=INK)
    ax.set_ylabel(y, color=INK)
    ax.tick_params(colors=INK, labelsize=9)
