"""Bits per byte of models in training, against their steps and against their seconds."""

from collections.abc import Sequence
from typing import Any

from efficient_attn.analysis.curves import YARDSTICK
from efficient_attn.report.harmless import plain
from efficient_attn.report.palette import GRID, INK, MUTED, line_styles
from efficient_attn.report.readable import short
from efficient_attn.studies.train.analysis import TrainingCurve, TrainingRun, training_runs
from efficient_attn.studies.train.tables import heading
from efficient_attn.sweep.amounts import show_seconds
from efficient_attn.sweep.records import Record

# What training is called among the things that can be plotted.
TRAINING = "training"

_WIDTH_INCHES, _ROW_INCHES, _HEAD_INCHES = 11.0, 4.4, 0.8
_LONGEST_NAME = 40

# The first evaluations are far above all others; from this share of a curve on it has to fit on the axis.
_SHOWN_FROM = 0.2


def plot_training(records: Sequence[Record]) -> Any:
    """A row of two panels for each run; the axes of the first."""
    from matplotlib.figure import Figure

    runs = [run for run in training_runs(records) if any(one.steps for one in run.curves)]
    rows = max(len(runs), 1)
    figure = Figure(figsize=(_WIDTH_INCHES, rows * _ROW_INCHES + _HEAD_INCHES), layout="constrained")
    grid = figure.subplots(rows, 2, squeeze=False, sharey="row")
    figure.suptitle(
        "Bits per byte of text held out, while models learn\n"
        "the same batches and first weights for all; the numbers are those after the last step",
        fontsize=11,
        color=INK,
    )
    for axes, run in zip(grid, runs, strict=False):
        drawn = [one for one in run.curves if one.steps]
        styles = _styles(drawn)
        for one in drawn:
            axes[0].plot(one.steps, one.held_out, **styles[one.label], label=plain(one.label))
            axes[1].plot(one.seconds_s, one.held_out, **styles[one.label], label=plain(one.label))
        if run.common_s is not None:
            axes[1].axvline(run.common_s, color=MUTED, linewidth=0.8, linestyle=(0, (1, 1.5)), zorder=0)
        for ax in axes:
            _dress(ax)
        axes[0].set_ylim(*_limits(drawn))
        axes[0].set_title(plain(heading(run)), loc="left", fontsize=9, color=MUTED, parse_math=False)
        axes[0].set_xlabel("steps", color=INK)
        axes[1].set_xlabel("seconds of training", color=INK)
        axes[0].set_ylabel("bits per byte", color=INK)
        _show_seconds(axes[1])
        _legend(axes[1], run, styles)
    return grid[0, 0]


def _styles(drawn: Sequence[TrainingCurve]) -> dict[str, dict[str, Any]]:
    """Lines without markers: the points are as many as evaluations; exact attention lies on top."""
    found = line_styles([(one.label, one.backend) for one in drawn])
    for one in drawn:
        found[one.label] |= {"marker": "", "linewidth": 2.4 if one.backend == YARDSTICK else 1.5}
        found[one.label]["zorder"] = 3 if one.backend == YARDSTICK else 2
    return found


def _limits(drawn: Sequence[TrainingCurve]) -> tuple[float, float]:
    """From a little below the lowest value up to where curves are when their first steps are over."""
    low = min(min(one.held_out) for one in drawn)
    high = max(one.held_out[int(_SHOWN_FROM * (len(one.held_out) - 1))] for one in drawn)
    margin = 0.05 * max(high - low, 0.1)
    return low - margin, high + margin


def _dress(ax: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.grid(axis="y", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.tick_params(colors=INK, which="both", length=3, labelsize=9)


def _show_seconds(ax: Any) -> None:
    from matplotlib.ticker import FuncFormatter

    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: show_seconds(value)))


def _legend(ax: Any, run: TrainingRun, styles: dict[str, dict[str, Any]]) -> None:
    """Every name beside the panels with its last value, the highest first, as the lines end."""
    from matplotlib.lines import Line2D

    drawn = [one for one in run.curves if one.steps]
    handles = [
        Line2D([], [], **styles[one.label], label=f"{one.held_out[-1]:.3f}  {_shown(one)}")
        for one in sorted(drawn, key=lambda one: -one.held_out[-1])
    ]
    legend = ax.legend(
        handles=handles,
        loc="center left",
        bbox_to_anchor=(1.02, 0.5),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _shown(one: TrainingCurve) -> str:
    return short(plain(one.label), _LONGEST_NAME)
