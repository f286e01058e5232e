"""Figure 4 of Choromanski et al. 2021: the error of the output against the number of random features."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from efficient_attn.report.figures import Plot
from efficient_attn.report.table import Table
from efficient_attn.runner.record import Record
from efficient_attn.runner.sizes import MEAN_OF_VALUES, sized
from efficient_attn.stats.median import Middle, middle
from efficient_attn.stats.verdicts import Finding, of_all
from efficient_attn.studies.mse.plan import plan as mse
from efficient_attn.studies.mse.plot import error_plot
from efficient_attn.studies.mse.tables import error_tables
from efficient_attn.studies.plan import Plan
from efficient_attn.studies.reproduce.figures import Setting

TITLE = "Figure 4: output error by number of features, orthogonal and iid, positive and trigonometric"
PAPER = "Choromanski et al. 2021, Rethinking Attention with Performers, https://arxiv.org/abs/2009.14794"

# As in the paper; it does not say how its inputs are normalised, so they are taken at several norms.
_TOKENS, _HEAD_DIM, _SAMPLES = 4096, 16, 15
_NORMS, _SIZES = (0.5, 0.75, 1.0, 1.5), (16, 32, 64, 128, 256)
_QUICK_TOKENS, _QUICK_SAMPLES, _QUICK_NORMS, _QUICK_SIZES = 256, 6, (0.5, 1.5), (16, 32)

_TRIGONOMETRIC, _POSITIVE = "performer-trig", "performer-positive"
_BACKENDS = {_POSITIVE: "positive", _TRIGONOMETRIC: "trigonometric"}
_IID, _ORTHOGONAL = "iid", "orthogonal"
_PROJECTIONS = (_ORTHOGONAL, _IID)

_MSE = "output_mse"


class Line(NamedTuple):
    """A line at one size; the baseline has no projection."""

    backend: str
    projection: str | None
    size: int | None


# Errors of every sample, by norm, line and sample.
Samples = dict[float, dict[Line, dict[int, float]]]


def plan(setting: Setting) -> Plan:
    """The study `mse`; every sample has inputs and directions of its own, the same for all maps."""
    return mse(
        list(_BACKENDS),
        inputs="gaussian",
        norms=_QUICK_NORMS if setting.quick else _NORMS,
        sizes=_QUICK_SIZES if setting.quick else _SIZES,
        metric="mse",
        draws=1,
        data_seeds=_QUICK_SAMPLES if setting.quick else _SAMPLES,
        seq_len=_QUICK_TOKENS if setting.quick else _TOKENS,
        head_dim=_HEAD_DIM,
        options={name: {"projection": _PROJECTIONS} for name in _BACKENDS},
        threads=setting.threads,
    )


def tables(records: Sequence[Record]) -> list[Table]:
    """The tables of `mse`, one for each norm."""
    return error_tables(records)


def draw(records: Sequence[Record]) -> Plot:
    """A chart for each norm: the error against the number of features, with the baselines."""
    return error_plot([record for record in records if record.status == "ok"], _MSE)


def samples_of(records: Sequence[Record]) -> Samples:
    """Errors by rising norm; former runs hold all samples of a line in one record."""
    found: Samples = {}
    for record in records:
        case, norm = record.case, re.search(r"norm=([\d.]+)", record.case.inputs)
        if record.status == "ok" and record.output_mse_draws and norm:
            line = Line(case.backend, case.options.get("projection"), sized(case).size)
            errors = found.setdefault(float(norm[1]), {}).setdefault(line, {})
            errors |= {
                sample: error for sample, error in enumerate(record.output_mse_draws, case.seed) if error
            }
    return dict(sorted(found.items()))


def findings(records: Sequence[Record]) -> list[Finding]:
    """A verdict on every claim: ratios of errors, sample by sample."""
    found = samples_of(records)
    return [
        *(_positive_is_better(found, projection) for projection in _PROJECTIONS),
        *(_orthogonal_is_better(found, backend) for backend in _BACKENDS),
        *(_more_features_help(found, backend) for backend in _BACKENDS),
        *(_better_than_the_mean(found, backend) for backend in _BACKENDS),
    ]


def _positive_is_better(found: Samples, projection: str) -> Finding:
    """Trigonometric features have the larger error at as many features, the most that were measured.

    With few features their denominators cross zero, so that small sizes are not representative.
    """
    claim = (
        f"Positive features have a lower error than trigonometric ones, {projection} directions (figure 4)"
    )
    most = _sizes(found)[-1]
    pair = Line(_TRIGONOMETRIC, projection, most), Line(_POSITIVE, projection, most)
    before = f"with {most} features the error of trigonometric ones is"
    return _judged(claim, before, "times as large", _ratios(found, [pair]))


def _orthogonal_is_better(found: Samples, backend: str) -> Finding:
    """Independent directions have the larger error at as many features, all sizes taken together."""
    claim = (
        f"Orthogonal directions give a lower error than iid ones, {_BACKENDS[backend]} features (figure 4)"
    )
    pairs = [(Line(backend, _IID, size), Line(backend, _ORTHOGONAL, size)) for size in _sizes(found)]
    ratios = _ratios(found, pairs)
    return _judged(claim, "the error with iid directions is", "times as large, mean over sizes", ratios)


def _more_features_help(found: Samples, backend: str) -> Finding:
    """The error of the fewest features is the larger one."""
    claim = f"More features give a lower error, {_BACKENDS[backend]} ones, orthogonal (figure 4)"
    few, many = _sizes(found)[0], _sizes(found)[-1]
    ratios = _ratios(found, [(Line(backend, _ORTHOGONAL, few), Line(backend, _ORTHOGONAL, many))])
    return _judged(claim, f"the error with {few} features is", f"times that with {many}", ratios)


def _better_than_the_mean(found: Samples, backend: str) -> Finding:
    """Not in the paper, but needed for any use: the output is nearer than uniform attention."""
    claim = (
        f"The output is nearer than the mean of V, {_BACKENDS[backend]} features (not in the paper's figure)"
    )
    most = _sizes(found)[-1]
    pair = Line(MEAN_OF_VALUES, None, None), Line(backend, _ORTHOGONAL, most)
    return _judged(
        claim, "the error of the mean of V is", f"times that of {most} features", _ratios(found, [pair])
    )


def _judged(claim: str, before: str, after: str, ratios: Mapping[float, Middle]) -> Finding:
    """A claim that a ratio is above 1 at every norm."""
    texts = "; ".join(
        f"{one.median:.2g} ({one.low:.2g} to {one.high:.2g}) at norm {norm:g}" for norm, one in ratios.items()
    )
    count = min((one.samples for one in ratios.values()), default=0)
    measured = f"{before} {texts}: {after}, median and 95 % interval of {count}"
    answers = {
        f"norm {norm:g}": one.low > 1 if one.low > 1 or one.high < 1 else None for norm, one in ratios.items()
    }
    return Finding(claim, measured if ratios else "nothing was measured", of_all(answers))


def _ratios(found: Samples, pairs: Sequence[tuple[Line, Line]]) -> dict[float, Middle]:
    """Ratio of errors by norm: median over samples of the geometric mean over pairs of lines."""
    made = {}
    for norm, lines in found.items():
        both = [(lines[above], lines[below]) for above, below in pairs if {above, below} <= lines.keys()]
        common = set.intersection(*(above.keys() & below.keys() for above, below in both)) if both else ()
        if common:
            logs = [
                [np.log(above[sample]) - np.log(below[sample]) for sample in sorted(common)]
                for above, below in both
            ]
            centre = middle(np.mean(logs, axis=0).tolist())
            median, low, high = np.exp(centre[:3]).tolist()
            made[norm] = Middle(median, low, high, centre.samples)
    return made


def _sizes(found: Samples) -> list[int]:
    """Numbers of features, ascending; 0 if there are none."""
    lines = {line for lines in found.values() for line in lines if line.projection == _ORTHOGONAL}
    return sorted({line.size for line in lines if line.size is not None}) or [0]
