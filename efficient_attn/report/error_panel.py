"""One panel of errors against size: curves with their intervals, and the yardsticks behind them."""

from collections.abc import Mapping, Sequence
from typing import Any

from efficient_attn.analysis.accuracy import ErrorCurve, Panel
from efficient_attn.report.error_table import show_error, title
from efficient_attn.report.harmless import plain
from efficient_attn.report.palette import GRID, INK, MUTED
from efficient_attn.sweep.sizes import MEAN_OF_VALUES

# An error of this many times the yardstick is off the scale: a hundred or a million, both are no attention.
_WORST = 12.0

# Errors below this share of the yardstick are rounding, and leave the axes through their floor.
_ROUNDING = 1e-4

# Beyond this the margins of an axis are no floating-point numbers any more.
_LARGEST = 1e300
# The square of a smaller relative error may be no floating-point number any more.
_SMALLEST = 1e-100

# Of the yardsticks that are no backends: low ranks, and Taylor series of order 1 and 2.
_STROKES: tuple[Any, ...] = ("-", (0, (1, 1.5)), (0, (6, 2, 1, 2)))

# Distance of the yardstick's name from the axes, and beyond the numbers of a second axis.
_GAP_POINTS, _BEYOND_POINTS = 5, 46

# How far below the best backend the axes follow a yardstick.
_FURTHER = 10.0


def draw_panel(
    ax: Any,
    panel: Panel,
    styles: Mapping[str, Mapping[str, Any]],
    scale: tuple[float, float],
    *,
    squared: bool = False,
) -> None:
    """Draw the curves of a panel, errors between the two ends of the scale.

    Args:
        squared: Add an axis of mean squared errors to one of relative errors.
    """
    for curve in panel.curves:
        style = styles[curve.label]
        if has_sizes(curve):
            _draw_curve(ax, curve, style)
        elif not is_rounding(curve.points[0].value, [panel]):
            ax.axhline(curve.points[0].value, **{**style, "marker": ""}, label=plain(curve.label), zorder=3)
    for curve in panel.others:
        points = [point for point in curve.points if point.size is not None]
        if points:
            ax.plot([p.size for p in points], [p.value for p in points], **plain_style(curve), zorder=1.5)
        else:
            ax.axhline(curve.points[0].value, **plain_style(curve), zorder=1)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_ylim(*scale)
    _yardstick(ax, panel, beyond=squared and _squared_axis(ax, panel))
    _off_the_scale(ax, panel, styles, scale[1])
    _dress(ax, panel)


def _draw_curve(ax: Any, curve: ErrorCurve, style: Mapping[str, Any]) -> None:
    points = [point for point in curve.points if point.size is not None]
    sizes = [point.size for point in points]
    ax.plot(sizes, [point.value for point in points], **style, label=plain(curve.label), zorder=3)
    ax.fill_between(
        sizes,
        [point.low for point in points],
        [point.high for point in points],
        color=style["color"],
        alpha=0.18,
        linewidth=0,
        zorder=2,
    )
    for point in points:
        if point.data_low is not None and point.data_high is not None:
            ax.vlines(
                point.size, point.data_low, point.data_high, color=style["color"], linewidth=3.2, zorder=4
            )


def plain_style(curve: ErrorCurve) -> dict[str, Any]:
    """Of a yardstick that is no backend: thin, grey, one stroke for each."""
    orders = [int(word) for word in curve.label.split() if word.isdecimal()]
    stroke = _STROKES[orders[0] % len(_STROKES) if orders else 0]
    return {"color": MUTED, "linestyle": stroke, "linewidth": 1.1}


def _squared_axis(ax: Any, panel: Panel) -> bool:
    """Draw the mean squared error on the right, relative² · mean(exact²); whether it is drawn."""
    factor = mean_square(panel)
    low, high = ax.get_ylim()
    if factor is None or not 1 / _LARGEST < factor * low**2 < factor * high**2 < _LARGEST:
        return False
    right = ax.secondary_yaxis(
        "right",
        functions=(lambda relative: factor * relative**2, lambda squared: (squared / factor) ** 0.5),
    )
    right.tick_params(colors=MUTED, which="major", length=3, labelsize=8)
    right.tick_params(which="minor", length=0, labelright=False)
    right.spines["right"].set_color(MUTED)
    right.set_ylabel("mean squared error", color=MUTED, fontsize=8, labelpad=1)
    return True


def mean_square(panel: Panel) -> float | None:
    """mean(exact²) of the input, from a draw of which both errors were kept; None if there is none."""
    for point in (point for curve in panel.curves for point in curve.points):
        record = point.record
        both = zip(record.output_relative_error_draws or (), record.output_mse_draws or (), strict=False)
        for relative, squared in both:
            if relative and squared and _SMALLEST < relative < _LARGEST**0.5 and squared < _LARGEST:
                return squared / relative**2
    return None


def _yardstick(ax: Any, panel: Panel, *, beyond: bool) -> None:
    """The line of the mean of the values, named on the right, beyond the numbers of a second axis."""
    if panel.yardstick is None:
        return
    ax.axhline(panel.yardstick, color=INK, linestyle=(0, (4, 3)), linewidth=1.2, zorder=1)
    ax.annotate(
        f"{MEAN_OF_VALUES}\n{show_error(panel.yardstick)}",
        xy=(1.0, panel.yardstick),
        xycoords=("axes fraction", "data"),
        xytext=(_BEYOND_POINTS if beyond else _GAP_POINTS, 0),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
        color=INK,
        annotation_clip=False,
    )


def _off_the_scale(ax: Any, panel: Panel, styles: Mapping[str, Mapping[str, Any]], high: float) -> None:
    """Say at the upper edge which curves run above it, and from where to where."""
    above = [
        curve for curve in (*panel.others, *panel.curves) if min(point.value for point in curve.points) > high
    ]
    for row, curve in enumerate(above):
        values = [point.value for point in curve.points]
        ends = dict.fromkeys((show_error(min(values)), show_error(max(values))))
        ax.annotate(
            plain(f"▲ {curve.label}: {' to '.join(ends)}"),
            xy=(0.02, 0.97),
            xycoords="axes fraction",
            xytext=(0, -12 * row),
            textcoords="offset points",
            va="top",
            fontsize=8.5,
            color=styles[curve.label]["color"] if curve.label in styles else MUTED,
            parse_math=False,
        )


def _dress(ax: Any, panel: Panel) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    sizes = sorted(
        {point.size for c in (*panel.others, *panel.curves) for point in c.points if point.size is not None}
    )
    ax.xaxis.set_major_locator(FixedLocator([size for size in sizes if size - 1 not in sizes]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.grid(axis="y", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(MUTED)
    ax.tick_params(colors=INK, which="both", length=3, labelsize=9, labelleft=True)
    matched = next((p.record.matched for c in panel.curves for p in c.points if p.record.matched), None)
    budget = f"budget: the {matched} of performer-positive with so many features"
    ax.set_xlabel(budget if matched else "size: features, rank or window", color=INK, fontsize=9.5)
    ax.set_title(plain(title(panel)), loc="left", fontsize=9.5, color=INK, parse_math=False)


def limits(shown: Sequence[Panel]) -> tuple[float, float]:
    """From below the smallest error that is no rounding to above the largest that is no nonsense."""
    yardsticks = [panel.yardstick for panel in shown if panel.yardstick]
    worst = _WORST * max(yardsticks, default=1.0)
    curves = [c for panel in shown for c in panel.curves if min(point.value for point in c.points) <= worst]
    edges = [edge for c in curves for point in c.points for edge in (point.value, point.low)]
    told = [edge for edge in (*edges, *yardsticks) if 0 < edge < _LARGEST and not is_rounding(edge, shown)]
    told = told or [1.0]
    others = [point.value for panel in shown for curve in panel.others for point in curve.points]
    near = [value for value in others if min(told) / _FURTHER <= value <= min(worst, _LARGEST)]
    return min(told + near) / 1.4, min(max(told + near), worst) * 1.8


def is_rounding(value: float, shown: Sequence[Panel]) -> bool:
    """Whether an error is far below every yardstick, where lines tell nothing."""
    return value < _ROUNDING * min((panel.yardstick or 1.0 for panel in shown), default=1.0)


def has_sizes(curve: ErrorCurve) -> bool:
    """Whether a curve is a line over sizes, rather than one number."""
    return any(point.size is not None for point in curve.points)
