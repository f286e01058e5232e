"""Figure 4 of Choromanski et al. 2021: the error of the output against the number of random features."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from efficient_attn.analysis.statistics import middle
from efficient_attn.analysis.verdicts import not_measured
from efficient_attn.experiments.reproduce import _fig4_claims as claims
from efficient_attn.experiments.reproduce._fig4 import BACKENDS, MSE, PROJECTIONS, inputs, norm_of
from efficient_attn.experiments.reproduce._parts import Part, measure_parts
from efficient_attn.experiments.reproduction import Setting
from efficient_attn.report.error_table import describe, show_error
from efficient_attn.report.figures import Plot
from efficient_attn.report.table import Table
from efficient_attn.studies.mse.analysis import ErrorCurve, Panel, panels
from efficient_attn.studies.mse.plot import error_plot
from efficient_attn.sweep.case import Case, Record, replace
from efficient_attn.sweep.questions import ask
from efficient_attn.sweep.run import Step
from efficient_attn.sweep.sizes import MEAN_OF_VALUES, sized, with_size
from efficient_attn.sweep.variants import select

TITLE = "Figure 4: output error by number of features, orthogonal and iid, positive and trigonometric"
PAPER = "Choromanski et al. 2021, Rethinking Attention with Performers, https://arxiv.org/abs/2009.14794"

findings = claims.findings

# As in the paper; it does not say how its inputs are normalised, so they are taken at several norms.
_TOKENS, _HEAD_DIM, _SAMPLES = 4096, 16, 15
_NORMS, _SIZES = (0.5, 0.75, 1.0, 1.5), (16, 32, 64, 128, 256)
_QUICK_TOKENS, _QUICK_SAMPLES, _QUICK_NORMS, _QUICK_SIZES = 256, 6, (0.5, 1.5), (16, 32)

_QUESTION = ask(metric="mse", draws=1)


def measure(
    setting: Setting, *, emit: Callable[[Record], None], progress: Callable[[Step], None] | None
) -> bool:
    """Norm by norm; every sample has inputs and directions of its own, the same for all maps."""
    norms = _QUICK_NORMS if setting.quick else _NORMS
    parts = [
        Part(
            f"norm {norm:g}",
            partial(_measured, norm, quick=setting.quick),
            [_skipped(norm, setting)],
        )
        for norm in norms
    ]
    return measure_parts(parts, setting, emit=emit, progress=progress)


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One row for each norm, map, projection and number of features."""
    made = []
    for record in records:
        found = middle(record.output_mse_draws) if record.output_mse_draws else None
        name, size = sized(record.case)
        made.append(
            {
                "norm": norm_of(record.case),
                "label": name,
                "size": size,
                "output_mse": found and found.median,
                "output_mse_low": found and found.low,
                "output_mse_high": found and found.high,
                "samples": found and found.samples,
                "unsafe_rows": record.unsafe_rows,
                "not_measured": record.reason,
            }
        )
    return made


def tables(records: Sequence[Record]) -> list[Table]:
    """One for each norm: medians with their intervals, the yardsticks first."""
    made = [_table(panel) for panel in panels(records, MSE)]
    if made:
        notes = (
            "Medians of the mean squared error with 95 % intervals over samples; each sample has inputs "
            "(q, k ~ N(0, norm²), v ~ N(0, 1), seeds from 0 on) and directions of its own. Taylor and rank-r "
            "SVD: the first sample.",
            "What has no size stands in the first column.",
            "Size: features, or the rank of the nearest matrix; trigonometric features are two a direction.",
        )
        made[-1] = made[-1]._replace(notes=(*notes, *not_measured(records)))
    return made


def draw(records: Sequence[Record]) -> Plot:
    """A chart for each norm: the error against the number of features, with the baselines."""
    return error_plot([record for record in records if record.status == "ok"], MSE)


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


def _measured(norm: float, *, quick: bool) -> Iterator[Record]:
    """The records of one norm, each with an error for every sample."""
    from efficient_attn.sweep.accuracy import measure_error
    from efficient_attn.sweep.subjects import subjects
    from efficient_attn.sweep.yardsticks import (
        TAYLOR_ORDERS,
        mean_of_values,
        measure_yardstick,
        oracle,
        taylor,
    )

    tokens = _QUICK_TOKENS if quick else _TOKENS
    samples = _QUICK_SAMPLES if quick else _SAMPLES
    sizes = _QUICK_SIZES if quick else _SIZES
    variants = select(BACKENDS, {name: {"projection": PROJECTIONS} for name in BACKENDS})
    drawn = subjects(
        ["gaussian"], norms=[norm], tokens=tokens, head_dim=_HEAD_DIM, layers=None, seed=0, data_seeds=samples
    )
    groups: dict[str, list[Record]] = {}
    for number, subject in enumerate(drawn):
        yardsticks = [mean_of_values()]
        if number == 0:
            yardsticks += [taylor(order, _HEAD_DIM) for order in TAYLOR_ORDERS]
            yardsticks += [oracle(size) for size in sizes]
        found = [measure_yardstick(one, subject, _QUESTION, ranks=max(sizes)) for one in yardsticks]
        for variant in variants:
            for size in sizes:
                found.append(measure_error(with_size(variant, "num_features", size), subject, _QUESTION))
        for record in found:
            groups.setdefault(record.case.label, []).append(record)
    for group in groups.values():
        yield _merged(group, inputs(norm))


def _merged(records: Sequence[Record], name: str) -> Record:
    """One record of all samples; the first that failed, if one did."""
    failed = next((record for record in records if record.status != "ok"), None)
    first = failed or records[0]
    case = replace(first.case, inputs=name)
    if failed:
        return replace(failed, case=case)
    errors = tuple(record.output_mse for record in records if record.output_mse is not None)
    unsafe = [record.unsafe_rows for record in records if record.unsafe_rows is not None]
    return replace(
        first,
        case=case,
        output_mse=fmean(errors),
        output_mse_draws=errors,
        unsafe_rows=fmean(unsafe) if unsafe else None,
    )


def _skipped(norm: float, setting: Setting) -> Record:
    """What stands for a norm that there was no time for."""
    case = Case(
        kind="error",
        backend=BACKENDS[0],
        label=f"everything at norm {norm:g}",
        of="output",
        num_heads=1,
        head_dim=_HEAD_DIM,
        tokens=_TOKENS,
        dtype="float32",
        device="cpu",
        threads=setting.threads,
        inputs=inputs(norm),
    )
    return Record(case=case)
