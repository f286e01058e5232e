"""Errors against size, one panel per input, the mean of the values as a line to beat in each."""

from collections.abc import Mapping, Sequence
from typing import Any

from efficient_attn.analysis.accuracy import Panel, panels, quantity_in
from efficient_attn.analysis.statistics import FEWEST_FOR_95
from efficient_attn.errors import OptionError
from efficient_attn.report.error_panel import draw_panel, has_sizes, is_rounding, limits, plain_style
from efficient_attn.report.error_table import NAMES, show_error
from efficient_attn.report.harmless import plain
from efficient_attn.report.palette import INK, line_styles
from efficient_attn.report.readable import short
from efficient_attn.sweep.records import Record
from efficient_attn.sweep.sizes import MEAN_OF_VALUES

_PANEL_INCHES = (4.5, 3.3)
_HEAD_INCHES, _LEGEND_INCHES = 0.75, 2.6

_LONGEST_NAME = 40
RELATIVE = "output_relative_error"


def plot(records: Sequence[Record], *, y: str = RELATIVE, x: str | None = None, ax: Any = None) -> Any:
    """Draw the error of every backend against its size; the axes of the first input.

    Args:
        ax: Axes for the only input, or one for each; a figure with a panel per input is made if left out.
    """
    if x not in (None, "size"):
        raise OptionError(f"x is size for errors, not {x!r}.")
    quantity = quantity_in(records, y)
    shown = panels(records, quantity)
    styles = styles_of(shown)
    axes = _grid(shown, styles, quantity) if ax is None else _given(ax, shown)
    for one, panel in zip(axes, shown, strict=True):
        # Inputs of one source share a scale, so that they can be compared.
        scale = limits([other for other in shown if other.source == panel.source])
        draw_panel(one, panel, styles, scale, squared=quantity == RELATIVE)
        if ax is not None or one.get_subplotspec().is_first_col():
            one.set_ylabel(NAMES[quantity].lower(), color=INK)
    return axes[0]


def styles_of(shown: Sequence[Panel]) -> dict[str, dict[str, Any]]:
    """{label: style}, the same in every panel."""
    return line_styles(
        list({curve.label: curve.backend for panel in shown for curve in panel.curves}.items())
    )


def _given(ax: Any, shown: Sequence[Panel]) -> list[Any]:
    axes = list(ax) if isinstance(ax, (list, tuple)) else [ax]
    if len(axes) != len(shown):
        names = ", ".join(panel.inputs for panel in shown)
        raise OptionError(f"ax is one for each of the {len(shown)} inputs ({names}), not {len(axes)}.")
    return axes


def _grid(shown: Sequence[Panel], styles: Mapping[str, Mapping[str, Any]], quantity: str) -> list[Any]:
    """Axes for every panel, a row for each source of inputs, and the legend where there is room."""
    from matplotlib.figure import Figure

    sources = list(dict.fromkeys(panel.source for panel in shown))
    rows = [[panel for panel in shown if panel.source == source] for source in sources]
    columns = max(map(len, rows), default=1)
    free = next((row for row, group in enumerate(rows) if len(group) < columns), None)
    width, height = columns * _PANEL_INCHES[0], max(len(rows), 1) * _PANEL_INCHES[1] + _HEAD_INCHES
    figure = Figure(figsize=(width + (_LEGEND_INCHES if free is None else 0), height), layout="constrained")
    grid = figure.subplots(max(len(rows), 1), columns, squeeze=False, sharey="row")
    for row, group in enumerate(rows):
        for empty in grid[row, len(group) :]:
            empty.set_axis_off()
    _head(figure, shown, quantity)
    lines = handles(shown, styles)
    for line in lines:
        line.set_label(short(line.get_label(), _LONGEST_NAME))
    legend = {"handles": lines, "frameon": False, "fontsize": 10, "labelcolor": INK}
    if free is None:
        drawn = figure.legend(loc="outside right center", **legend)
    else:
        drawn = grid[free, len(rows[free])].legend(loc="center left", **legend)
    for text in drawn.get_texts():
        text.set_parse_math(False)
    return [grid[sources.index(p.source), rows[sources.index(p.source)].index(p)] for p in shown]


def headline(shown: Sequence[Panel], quantity: str) -> tuple[str, str]:
    """What the plots show, and what lines, bands and bars are."""
    points = [point for panel in shown for curve in panel.curves for point in curve.points]
    draws = max((point.draws for point in points), default=1)
    seeds = max((point.data_seeds for point in points), default=1)
    told = [f"lines and bands: median of {draws} draws and its {interval(draws)}"] if draws > 1 else []
    told += [f"bars: {interval(seeds)} over {seeds} seeds of the inputs"] if seeds > 1 else []
    return f"{NAMES[quantity]} against exact softmax attention in float64", "; ".join(told)


def interval(samples: int) -> str:
    """What `middle` gives around the median of so many samples."""
    return "95 % interval" if samples >= FEWEST_FOR_95 else "range"


def _head(figure: Any, shown: Sequence[Panel], quantity: str) -> None:
    figure.suptitle(
        "; ".join(filter(None, headline(shown, quantity))),
        x=0.01,
        ha="left",
        fontsize=12,
        fontweight="bold",
        color=INK,
    )


def handles(shown: Sequence[Panel], styles: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """The lines, the yardstick, and in words what has no line."""
    from matplotlib.lines import Line2D

    sized = {curve.label for panel in shown for curve in panel.curves if has_sizes(curve)}
    made = [Line2D([], [], label=plain(label), **style) for label, style in styles.items() if label in sized]
    made.append(Line2D([], [], color=INK, linestyle=(0, (4, 3)), label=f"{MEAN_OF_VALUES} for every query"))
    others = {curve.label: curve for panel in shown for curve in panel.others}
    made += [Line2D([], [], label=plain(curve.label), **plain_style(curve)) for curve in others.values()]
    for label in dict.fromkeys(c.label for p in shown for c in p.curves if not has_sizes(c)):
        worst = max(c.points[0].value for p in shown for c in p.curves if c.label == label)
        if is_rounding(worst, shown):
            text = f"{label}: at most {show_error(worst)}, rounding"
            made.append(Line2D([], [], linestyle="none", label=plain(text)))
        else:
            made.append(Line2D([], [], label=plain(label), **{**styles[label], "marker": ""}))
    return made
