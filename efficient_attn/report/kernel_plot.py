"""The error of one kernel entry: measured points over the lines of theory, drawn."""

from collections.abc import Sequence
from textwrap import fill
from typing import Any

from efficient_attn.analysis.kernel import (
    AXES,
    KernelLine,
    KernelPanel,
    KernelPoint,
    kernel_panels,
    kernel_points,
    kernel_records,
    plain_guesses,
)
from efficient_attn.errors import UnknownNameError
from efficient_attn.report.harmless import plain
from efficient_attn.report.kernel_errors import NAME, WIDE, title_of
from efficient_attn.report.palette import GRID, INK, MUTED, line_styles
from efficient_attn.sweep.records import Record

_INCHES, _LEGEND_INCHES = (3.9, 3.1), 2.7
_LABELS = {"size": "features", "angle": "angle between query and key, degrees", "norm": "norm |x| = |y|"}
_STROKES: dict[str, Any] = {
    "constant 1": (0, (4, 3)),
    "Taylor order 1": (0, (1, 1.5)),
    "Taylor order 2": (0, (6, 2, 1, 2)),
}

# What may be plotted, and the axis that it is drawn over.
OVER = {"kernel_mse": "size", "kernel_mse_by_angle": "angle", "kernel_mse_by_norm": "norm"}

# How far below the least error the axes go, and how long a line of words below them is.
_FURTHER, _LINE = 10.0, 56

# Of a yardstick from one end of an axis to the other.
_STEPS = 240


def kernel_plots(records: Sequence[Record]) -> dict[str, str]:
    """The plots worth a file, {name: quantity}: over each axis on which there are two places."""
    points = kernel_points(records)
    moving = {axis for axis in AXES if len({point.at(axis) for point in points}) > 1}
    return {
        quantity.replace("_mse", "").replace("_", "-"): quantity
        for quantity, axis in OVER.items()
        if points and (axis == "size" or axis in moving)
    }


def plot_kernel(records: Sequence[Record], *, x: str = "size") -> Any:
    """Points with 95 % intervals over lines of theory, a panel for each value of the other axes."""
    from matplotlib.figure import Figure

    if x not in AXES:
        raise UnknownNameError("x axis for kernel_mse", x, AXES)
    shown = kernel_panels(records, x)
    columns = min(len(shown), 3)
    rows = -(-len(shown) // columns)
    size = (columns * _INCHES[0] + _LEGEND_INCHES, rows * _INCHES[1] + 0.7)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    axes[0, 0].set_ylim(*_limits(shown))
    styles = line_styles(list({one.label: one.backend for panel in shown for one in panel.lines}.items()))
    for number, ax in enumerate(axes.flat):
        if number >= len(shown):
            ax.set_axis_off()
            continue
        _draw(ax, shown[number], styles, x)
        if number % columns == 0:
            ax.set_ylabel("relative mean squared error", color=INK)
    draws = max((len(record.kernel_mse_draws or ()) for record in kernel_records(records)), default=0)
    figure.suptitle(
        f"{NAME}\nlines: theory; points: mean of {draws} draws, 95 % interval",
        x=0.01,
        ha="left",
        fontsize=12,
        fontweight="bold",
        color=INK,
    )
    _legend(figure, styles, shown)
    return axes[0, 0]


def _draw(ax: Any, panel: KernelPanel, styles: Any, x: str) -> None:
    lost = []
    for line in panel.lines:
        colour = styles[line.label]["color"]
        known = [(p.at(x), p.expected) for p in line.points if p.expected]
        ax.plot(*_columns(known), color=colour, linestyle=styles[line.label]["linestyle"], linewidth=1.3)
        points = [p for p in line.points if p.mean]
        ax.errorbar(
            [p.at(x) for p in points],
            [p.mean for p in points],
            yerr=_bars(points),
            color=colour,
            linestyle="none",
            marker=styles[line.label]["marker"],
            markersize=5,
            capsize=2,
        )
        lost += _lost(line, x)
    for name, stroke in _STROKES.items():
        places = _places(panel, x)
        guesses = [(place, _guess(panel, x, place)[name]) for place in places]
        ax.plot(*_columns([one for one in guesses if one[1] > 0]), color=MUTED, linestyle=stroke, linewidth=1)
    _dress(ax, panel, x)
    if lost:
        text = fill(plain(f"not measured, too few draws: {'; '.join(lost)}"), _LINE)
        ax.set_xlabel(f"{_LABELS[x]}\n{text}", color=INK, fontsize=8, parse_math=False)


def _places(panel: KernelPanel, x: str) -> list[float]:
    """Where a yardstick is drawn: closely, since it may vanish between two measured places."""
    known = [p.at(x) for line in panel.lines for p in line.points]
    low, high = min(known), max(known)
    return [low + (high - low) * step / _STEPS for step in range(_STEPS + 1)]


def _limits(shown: Sequence[KernelPanel]) -> tuple[float, float]:
    """Around what was measured or expected; yardsticks further below are in the tables."""
    points = [point for panel in shown for line in panel.lines for point in line.points]
    values = [value for point in points for value in (point.mean, point.expected) if value]
    return (min(values) / _FURTHER, max(values) * 2) if values else (1e-3, 1.0)


def _guess(panel: KernelPanel, x: str, place: float) -> dict[str, float]:
    known = dict(panel.fixed) | {x: place}
    return plain_guesses(known["norm"], known["angle"])


def _lost(line: KernelLine, x: str) -> list[str]:
    """Where a line has no points, and why."""
    places = [f"{p.at(x):g}" for p in line.points if p.mean is None and p.record.status == "skipped"]
    return [f"{line.label} {', '.join(places)}"] if places else []


def _bars(points: Sequence[KernelPoint]) -> list[list[float]]:
    """Down and up; an interval that reaches 0 ends at a hundredth of the mean."""
    wide = [WIDE * (p.error or 0.0) for p in points]
    down = [min(bar, 0.99 * (p.mean or 0.0)) for bar, p in zip(wide, points, strict=True)]
    return [down, wide]


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [one for one, _ in pairs], [other for _, other in pairs]


def _dress(ax: Any, panel: KernelPanel, x: str) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    places = sorted({p.at(x) for line in panel.lines for p in line.points})
    if x == "size":
        ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.xaxis.set_major_locator(FixedLocator(places))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.grid(axis="y", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.tick_params(colors=INK, which="both", labelsize=8.5)
    ax.set_xlabel(_LABELS[x], color=INK, fontsize=9.5)
    ax.set_title(title_of(panel), loc="left", fontsize=9.5, color=INK)


def _legend(figure: Any, styles: Any, shown: Sequence[KernelPanel]) -> None:
    from matplotlib.lines import Line2D

    silent = {
        line.label for panel in shown for line in panel.lines if all(p.expected is None for p in line.points)
    }
    handles = [
        Line2D([], [], **{**style, "linestyle": "none"} if label in silent else style)
        for label, style in styles.items()
    ]
    names = [f"{label} (no closed form)" if label in silent else label for label in styles]
    handles += [Line2D([], [], color=MUTED, linestyle=stroke, linewidth=1) for stroke in _STROKES.values()]
    legend = figure.legend(
        handles, [*map(plain, names), *_STROKES], loc="outside right center", frameon=False, fontsize=9
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
