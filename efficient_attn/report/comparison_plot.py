"""Error against time and against memory: what lies on the front, and where something would have to lie."""

from collections.abc import Sequence
from typing import Any

from efficient_attn.analysis.comparison import DEFAULT_MAX_ERROR, Comparison, Contender, comparisons
from efficient_attn.report.comparison import heading
from efficient_attn.report.error_table import layer_words, show_error
from efficient_attn.report.harmless import plain
from efficient_attn.report.palette import GRID, INK, MUTED, line_styles
from efficient_attn.report.readable import short
from efficient_attn.sweep.amounts import show_bytes, show_seconds
from efficient_attn.sweep.layers import single_names
from efficient_attn.sweep.records import Record
from efficient_attn.sweep.sizes import MEAN_OF_VALUES, ORACLE, YARDSTICKS

# What a comparison is called among the things that can be plotted.
COMPARISON = "comparison"

_WIDTH_INCHES, _ROW_INCHES, _HEAD_INCHES = 11.0, 4.2, 0.8
_LONGEST_NAME = 34
# A space as wide as a digit, so that numbers stand below each other.
_DIGIT = "\u2007"

# Rounding is drawn this many times below the smallest error of a method: its own distance means nothing.
_BELOW = 3.0
# An error of this many times the mean of V's is drawn no higher.
_WORST = 3.0

_PANELS = (
    ("time_s", "time of one call", show_seconds),
    ("peak_bytes", "peak memory of one call, beside its inputs", show_bytes),
)

# A range of costs smaller than this gets numbers within its decades too.
_FEW_DECADES = 200

# Of the best that low ranks could do, which have no cost and are lines across.
_STROKES: tuple[Any, ...] = ((0, (1, 1.5)), (0, (5, 2)), "-.")


def plot_comparisons(records: Sequence[Record], max_error: float = DEFAULT_MAX_ERROR) -> Any:
    """A row of two panels for each comparison; the axes of the first."""
    from matplotlib.figure import Figure

    found = comparisons(records)
    rows = max(len(found), 1)
    figure = Figure(figsize=(_WIDTH_INCHES, rows * _ROW_INCHES + _HEAD_INCHES), layout="constrained")
    grid = figure.subplots(rows, len(_PANELS), squeeze=False, sharey="row")
    figure.suptitle(
        "What each error costs\nfilled: nothing else has both less error and less cost; "
        f"shaded: within {100 * max_error:g} % of exact, and cheaper",
        fontsize=11,
        color=INK,
    )
    named = [(row.label, row.backend) for one in found for row in one.contenders]
    styles = _styles(list(dict.fromkeys(named)))
    for axes, one in zip(grid, found, strict=False):
        for number, (ax, panel) in enumerate(zip(axes, _PANELS, strict=True)):
            _draw(ax, one, panel, styles, max_error)
            title = heading(one) if number == 0 else ""
            ax.set_title(plain(title), loc="left", pad=10, fontsize=9, color=MUTED, parse_math=False)
        axes[0].set_ylabel("relative output error", color=INK)
        _legend(axes[-1], one, styles)
    return grid[0, 0]


def _styles(named: Sequence[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """{label: colour and marker, or stroke}; yardsticks are grey."""
    lines = line_styles([(label, backend) for label, backend in named if backend not in YARDSTICKS])
    found = {
        label: {"color": one["color"], "marker": one["marker"], "linestyle": "none"}
        for label, one in lines.items()
    }
    oracles = [label for label, backend in named if backend == ORACLE]
    found |= {
        label: {"color": MUTED, "linestyle": _STROKES[number % len(_STROKES)], "linewidth": 1.0}
        for number, label in enumerate(oracles)
    }
    plain_guess = {"color": MUTED, "marker": (4, 1, 0), "linestyle": "none"}
    return found | {label: plain_guess for label, backend in named if backend == MEAN_OF_VALUES}


def _draw(ax: Any, one: Comparison, panel: Any, styles: dict[str, dict[str, Any]], max_error: float) -> None:
    quantity, name, _ = panel
    floor, ceiling = _limits(one, max_error)
    front = one.front(quantity)
    ax.set_xscale("log")
    ax.set_yscale("log")
    for row in one.contenders:
        if row.error is None:
            continue
        style, y = styles[row.label], _height(row, one, floor, ceiling)
        if row.backend == ORACLE:
            ax.axhline(y, **style, zorder=1)
        elif cost := row.cost(quantity):
            if row.layers > 1:
                ends = [_height_of(error, one, floor, ceiling) for error in (row.error.low, row.error.high)]
                ax.vlines(cost, *ends, color=style["color"], linewidth=1.2, zorder=2)
            fill = style["color"] if row in front else "none"
            size = {"markersize": 9, "markeredgewidth": 1.6, "clip_on": False}
            ax.plot([cost], [y], **style, **size, markerfacecolor=fill, zorder=3, label=plain(row.label))
    steps = [(cost, _height(row, one, floor, ceiling)) for row in front if (cost := row.cost(quantity))]
    if steps:
        ax.plot(*zip(*steps, strict=True), drawstyle="steps-post", color=MUTED, linewidth=1.0, zorder=2)
    _shade(ax, one, quantity, max_error, floor)
    highest = max((row.worst for row in one.contenders if row.error is not None), default=0.0)
    _dress(ax, panel, floor, ceiling, clipped=highest > ceiling)
    ax.set_xlabel(name, color=INK)


def _limits(one: Comparison, max_error: float) -> tuple[float, float]:
    """Where rounding is drawn, and above what nothing is."""
    errors = [error for row in one.contenders if row.error for error in (row.error.low, row.error.high)]
    errors += [row.error.median for row in one.contenders if row.error]
    real = [error for error in errors if error > one.rounding]
    plainest = [row.error.median for row in one.contenders if row.backend == MEAN_OF_VALUES and row.error]
    ceiling = _WORST * max(*plainest, *(error for error in real if error <= 1), max_error, 0.5)
    return min([*real, max_error]) / _BELOW, ceiling


def _height(row: Contender, one: Comparison, floor: float, ceiling: float) -> float:
    return _height_of(row.error.median if row.error is not None else ceiling, one, floor, ceiling)


def _height_of(error: float, one: Comparison, floor: float, ceiling: float) -> float:
    return floor if error <= one.rounding else min(error, ceiling)


def _shade(ax: Any, one: Comparison, quantity: str, max_error: float, floor: float) -> None:
    """Where something would be both nearly exact and cheaper than exact attention."""
    edge = one.exact.cost(quantity) if one.exact is not None else None
    if edge:
        left, _ = ax.get_xlim()
        ax.fill_between([left, edge], floor / 2, max_error, color=GRID, alpha=0.6, linewidth=0, zorder=0)
        ax.set_xlim(left=left)


def _dress(ax: Any, panel: Any, floor: float, ceiling: float, *, clipped: bool) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    quantity, _, show = panel
    low, high = ax.get_xlim()
    few = high / low < _FEW_DECADES
    if quantity == "time_s":
        ax.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 3) if few else (1,)))
    else:
        ax.xaxis.set_major_locator(LogLocator(base=2 if few else 4, numticks=9))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.xaxis.set_minor_locator(NullLocator())
    ticks = [tick for tick in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3) if floor * 1.3 < tick < ceiling]
    names = {floor: "rounding", **{tick: f"{tick:g}" for tick in ticks}}
    # The highest place is that of all errors from there on; the legend has their numbers.
    names |= {ceiling: "higher"} if clipped else {}
    ax.yaxis.set_major_locator(FixedLocator(list(names)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: names.get(value, "")))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_ylim(floor / 1.3, ceiling)
    ax.grid(axis="y", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.tick_params(colors=INK, which="both", length=3, labelsize=9)


def _shown(row: Contender) -> str:
    return short(plain(row.label), _LONGEST_NAME)


def _legend_title(one: Comparison) -> str | None:
    """The meaning of points and bars where errors are those of several layers."""
    if len(single_names(one.case.inputs)) == 1:
        return None
    return f"error: median (bar: range)\nover {layer_words(one.case.inputs)}"


def _legend(ax: Any, one: Comparison, styles: dict[str, dict[str, Any]]) -> None:
    """Every name beside the panels, the smallest error last, as they stand in them."""
    from matplotlib.lines import Line2D

    known = [(row.error.median, row) for row in one.contenders if row.error is not None]
    handles = [
        Line2D([], [], **styles[row.label], label=f"{show_error(error).rjust(7, _DIGIT)}  {_shown(row)}")
        for error, row in sorted(known, key=lambda pair: -pair[0])
    ]
    drawn = ax.legend(
        handles=handles,
        loc="center left",
        bbox_to_anchor=(1.02, 0.5),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        title=_legend_title(one),
        title_fontsize=9,
        alignment="left",
    )
    for text in drawn.get_texts():
        text.set_parse_math(False)
