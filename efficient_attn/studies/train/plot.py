"""Bits per byte of models in training, against their steps and against their seconds."""

from collections.abc import Sequence

from efficient_attn.report.figures import Axis, Chart, Plot, Series
from efficient_attn.report.palette import baseline_style, line_styles
from efficient_attn.runner.records import Record
from efficient_attn.runner.units import show_seconds
from efficient_attn.stats.curves import YARDSTICK
from efficient_attn.studies.train.analysis import TrainingCurve, TrainingRun, training_runs
from efficient_attn.studies.train.tables import heading

# The name of this plot among the things that can be plotted.
TRAINING = "training"

# The first evaluations are far above all others; from this share of a curve on it has to fit on the axis.
_SHOWN_FROM = 0.2


def training_plot(records: Sequence[Record]) -> Plot:
    """A row of two charts for each run."""
    runs = [run for run in training_runs(records) if any(one.steps for one in run.curves)]
    styles = line_styles([(one.label, one.backend) for run in runs for one in run.curves if one.steps])
    return Plot(
        "Held-out bits per byte during training",
        f"{heading(runs[0]) if len(runs) == 1 else ''}\nthe same batches and initial weights for all",
        tuple(_charts(run, styles, heading(run) if len(runs) > 1 else "") for run in runs),
    )


def _charts(run: TrainingRun, styles: dict[str, dict[str, object]], head: str) -> tuple[Chart, ...]:
    drawn = [one for one in run.curves if one.steps]
    y = Axis("bits per byte", limits=_limits(drawn))
    common = [] if run.common_s is None else [Series("", (run.common_s,), (), baseline_style(2))]
    shown = [(styles[one.label], one) for one in drawn]
    steps = [_series(one, one.steps, style) for style, one in shown]
    seconds = [_series(one, one.seconds_s, style) for style, one in shown]
    return (
        Chart(Axis("steps", "log", "{:.0f}".format), y, tuple(steps), head),
        Chart(Axis("seconds of training", "log", show_seconds), y, (*seconds, *common)),
    )


def _series(one: TrainingCurve, x: Sequence[float], style: dict[str, object]) -> Series:
    """A line without markers: the points are as many as evaluations; exact attention lies on top."""
    exact = one.backend == YARDSTICK
    own = {**style, "marker": "", "linewidth": 2.4 if exact else 1.5, "zorder": 3 if exact else 2}
    return Series(one.label, x, one.held_out, own)


def _limits(drawn: Sequence[TrainingCurve]) -> tuple[float, float]:
    """From a little below the lowest value up to where curves are when their first steps are over."""
    low = min(min(one.held_out) for one in drawn)
    high = max(one.held_out[int(_SHOWN_FROM * (len(one.held_out) - 1))] for one in drawn)
    margin = 0.05 * max(high - low, 0.1)
    return low - margin, high + margin
