"""Figure 4 of Choromanski et al. 2021: the error of the output against the number of random features."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from efficient_attn.report.error_table import describe, show_error
from efficient_attn.report.figures import Plot
from efficient_attn.report.table import Table
from efficient_attn.runner.record import Record
from efficient_attn.runner.sizes import MEAN_OF_VALUES
from efficient_attn.studies.mse.analysis import ErrorCurve, Panel, panels
from efficient_attn.studies.mse.plan import plan as mse
from efficient_attn.studies.mse.plot import error_plot
from efficient_attn.studies.plan import Plan
from efficient_attn.studies.reproduce.figures import Setting
from efficient_attn.studies.reproduce.figures.performer_fig4 import claims
from efficient_attn.studies.reproduce.figures.performer_fig4.claims import (
    BACKENDS,
    FIXED,
    MSE,
    PROJECTIONS,
    merged,
)

TITLE = "Figure 4: output error by number of features, orthogonal and iid, positive and trigonometric"
PAPER = "Choromanski et al. 2021, Rethinking Attention with Performers, https://arxiv.org/abs/2009.14794"

findings = claims.findings

# As in the paper; it does not say how its inputs are normalised, so they are taken at several norms.
_TOKENS, _HEAD_DIM, _SAMPLES = 4096, 16, 15
_NORMS, _SIZES = (0.5, 0.75, 1.0, 1.5), (16, 32, 64, 128, 256)
_QUICK_TOKENS, _QUICK_SAMPLES, _QUICK_NORMS, _QUICK_SIZES = 256, 6, (0.5, 1.5), (16, 32)


def plan(setting: Setting) -> Plan:
    """The study `mse`; every sample has inputs and directions of its own, the same for all maps."""
    made = mse(
        BACKENDS,
        inputs="gaussian",
        norms=_QUICK_NORMS if setting.quick else _NORMS,
        sizes=_QUICK_SIZES if setting.quick else _SIZES,
        metric="mse",
        draws=1,
        data_seeds=_QUICK_SAMPLES if setting.quick else _SAMPLES,
        seq_len=_QUICK_TOKENS if setting.quick else _TOKENS,
        head_dim=_HEAD_DIM,
        options={name: {"projection": PROJECTIONS} for name in BACKENDS},
        threads=setting.threads,
    )
    points = [one for one in made.points if one.case.seed == 0 or one.case.backend not in FIXED]
    return replace(made, points=points)


def tables(records: Sequence[Record]) -> list[Table]:
    """One for each norm: medians with their intervals, the yardsticks first."""
    made = [_table(panel) for panel in panels(merged(records), MSE)]
    if made:
        notes = (
            "Medians of the mean squared error with 95 % intervals over samples; each sample has inputs "
            "(q, k ~ N(0, norm²), v ~ N(0, 1), seeds from 0 on) and directions of its own. Taylor and rank-r "
            "SVD: the first sample.",
            "What has no size stands in the first column.",
            "Size: features, or the rank of the nearest matrix; trigonometric features are two a direction.",
        )
        made[-1] = made[-1]._replace(notes=notes)
    return made


def draw(records: Sequence[Record]) -> Plot:
    """A chart for each norm: the error against the number of features, with the baselines."""
    return error_plot([record for record in merged(records) if record.status == "ok"], MSE)


def _table(panel: Panel) -> Table:
    curves = (*panel.others, *panel.curves)
    sizes = sorted({point.size for curve in curves for point in curve.points if point.size is not None})

    def cells(curve: ErrorCurve) -> tuple[str, ...]:
        found = {point.size or sizes[0]: point for point in curve.points}
        return tuple(_interval(found[size]) if size in found else "" for size in sizes)

    plainest = "" if panel.yardstick is None else show_error(panel.yardstick)
    mean = (MEAN_OF_VALUES, plainest, *("",) * (len(sizes) - 1))
    body = [mean, *((curve.label, *cells(curve)) for curve in curves)]
    return Table(describe(panel.inputs), ("output error", *map(str, sizes)), tuple(body))


def _interval(point: Any) -> str:
    spread = f" ({show_error(point.low)} to {show_error(point.high)})" if point.draws > 1 else ""
    return f"{show_error(point.value)}{spread}"
