"""Accuracy after training, against what a query reads and against the error that was there before."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from efficient_attn.report.harmless import plain
from efficient_attn.report.palette import GRID, INK, MUTED, line_styles
from efficient_attn.report.readable import short
from efficient_attn.studies.recall.analysis import Contest, Learned, contests
from efficient_attn.studies.recall.tables import heading
from efficient_attn.studies.view import Environment, Plots
from efficient_attn.sweep.records import Record

_WIDTH_INCHES, _ROW_INCHES, _HEAD_INCHES = 11.0, 4.2, 0.7
_LONGEST_NAME = 40

# Errors below this are rounding, and have no place among those of methods.
_ROUNDING = 1e-4

# A range of errors smaller than this gets numbers at 1, 2 and 5 of each decade instead of at 1.
_FEW_DECADES = 1000
_GREY_MARKS: tuple[Any, ...] = ((4, 1, 0), (4, 2, 0))


def plots(records: Sequence[Record], environment: Environment) -> Plots:
    """The figure of all tasks; none if nothing was trained."""
    trained = any(record.status == "ok" for record in records)
    return {"recall": partial(draw, records)} if trained else {}


def draw(records: Sequence[Record]) -> Any:
    """A row of two panels for each task; the axes of the first."""
    from matplotlib.figure import Figure

    shown = contests(records)
    rows = max(len(shown), 1)
    figure = Figure(figsize=(_WIDTH_INCHES, rows * _ROW_INCHES + _HEAD_INCHES), layout="constrained")
    grid = figure.subplots(rows, 2, squeeze=False, sharey=True)
    figure.suptitle(
        "What training makes of it: accuracy of recall\n"
        "points: mean over seeds with its 95 % interval; dashed: a guess; on the right without what is exact",
        fontsize=11,
        color=INK,
    )
    for axes, one in zip(grid, shown, strict=False):
        _draw(axes, one)
    return grid[0, 0]


def _draw(axes: Any, one: Contest) -> None:
    reads, errs = axes
    styles = _styles(one)
    for series, rows in _series(one).items():
        _line(reads, [(row.floats_read, row) for row in rows], styles[series], series)
        known = [(row.untrained, row) for row in rows if (row.untrained or 0) > _ROUNDING]
        _line(errs, known, styles[series], series)
    for ax in axes:
        ax.axhline(one.rows[0].chance, color=MUTED, linestyle=(0, (4, 3)), linewidth=1.1, zorder=1)
        _dress(ax)
    reads.set_xscale("log", base=2)
    errs.set_xscale("log")
    reads.set_xlabel("numbers that a query reads, per head", color=INK)
    errs.set_xlabel("relative output error before training", color=INK)
    reads.set_ylabel("accuracy after training", color=INK)
    reads.set_title(plain(heading(one)), loc="left", fontsize=9, color=MUTED, parse_math=False)
    _ticks(reads, errs)
    _legend(errs, one, styles)


def _series(one: Contest) -> dict[str, list[Learned]]:
    """The rows of each backend by size, the best first."""
    found: dict[str, list[Learned]] = {}
    for row in one.rows:
        if row.accuracy is not None:
            found.setdefault(_name(one, row), []).append(row)
    return {name: sorted(rows, key=lambda row: row.sized.size or 0) for name, rows in found.items()}


def _name(one: Contest, row: Learned) -> str:
    """A control stands by itself."""
    return row.label if row in one.controls else row.sized.series


def _styles(one: Contest) -> dict[str, dict[str, Any]]:
    """Colour and marker of each series; controls are grey."""
    controls = [row.label for row in one.controls]
    named = {_name(one, row): row.case.backend for row in one.rows if row.label not in controls}
    grey = {
        label: {"color": MUTED, "marker": _GREY_MARKS[number % 2], "linestyle": "none", "markersize": 8}
        for number, label in enumerate(controls)
    }
    return line_styles(sorted(named.items())) | grey


def _line(
    ax: Any, points: Sequence[tuple[float | None, Learned]], style: Mapping[str, Any], name: str
) -> None:
    known = [(x, row.accuracy) for x, row in points if x and row.accuracy]
    if not known:
        return
    means = [accuracy.mean for _, accuracy in known]
    below = [accuracy.mean - accuracy.edges[0] for _, accuracy in known]
    above = [accuracy.edges[1] - accuracy.mean for _, accuracy in known]
    bars = {"elinewidth": 1.0, "capsize": 2, "clip_on": False}
    ax.errorbar(
        [x for x, _ in known], means, yerr=[below, above], **style, **bars, label=plain(name), zorder=3
    )


def _ticks(reads: Any, errs: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    reads.xaxis.set_major_locator(LogLocator(base=2, numticks=9))
    reads.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    low, high = errs.get_xlim()
    errs.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5) if high / low < _FEW_DECADES else (1,)))
    errs.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axis in (reads.xaxis, errs.xaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())


def _dress(ax: Any) -> None:
    ax.set_ylim(0, 1.02)
    ax.grid(axis="y", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.tick_params(colors=INK, which="both", length=3, labelsize=9)


def _legend(ax: Any, one: Contest, styles: Mapping[str, Mapping[str, Any]]) -> None:
    """Every name beside the panels with its best accuracy, the best first."""
    from matplotlib.lines import Line2D

    best = {
        name: max(row.accuracy.mean for row in rows if row.accuracy) for name, rows in _series(one).items()
    }
    handles = [
        Line2D([], [], **styles[name], label=f"{accuracy:.2f}  {short(plain(name), _LONGEST_NAME)}")
        for name, accuracy in sorted(best.items(), key=lambda item: -item[1])
    ]
    drawn = ax.legend(
        handles=handles,
        loc="center left",
        bbox_to_anchor=(1.02, 0.5),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        title="best accuracy",
        title_fontsize=9,
        alignment="left",
    )
    for text in drawn.get_texts():
        text.set_parse_math(False)
