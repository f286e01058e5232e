"""Figure 4 of Choromanski et al. 2021: the error of the output against the number of random features."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from efficient_attn.report.figures import Plot
from efficient_attn.runner.record import Record
from efficient_attn.runner.sizes import MEAN_OF_VALUES, sized
from efficient_attn.stats.median import middle
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

    def __str__(self) -> str:
        return ", ".join(str(part) for part in self if part is not None)


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


tables = error_tables


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
    """A verdict on every claim: the error of one line is larger than that of another, sample by sample."""
    found = samples_of(records)
    sizes = sorted({line.size for lines in found.values() for line in lines if line.size is not None}) or [0]
    few, most = sizes[0], sizes[-1]
    claims = [
        (
            "Positive features have a lower error than trigonometric ones, "
            f"{projection} directions (figure 4)",
            # With few features trigonometric denominators cross zero, and no size is representative.
            Line(_TRIGONOMETRIC, projection, most),
            Line(_POSITIVE, projection, most),
        )
        for projection in _PROJECTIONS
    ]
    for backend, kind in _BACKENDS.items():
        best = Line(backend, _ORTHOGONAL, most)
        claims += [
            (
                f"Orthogonal directions give a lower error than iid ones, {kind} features (figure 4)",
                Line(backend, _IID, most),
                best,
            ),
            (
                f"More features give a lower error, {kind} ones, orthogonal (figure 4)",
                Line(backend, _ORTHOGONAL, few),
                best,
            ),
            (
                f"The output is nearer than the mean of V, {kind} features (not in the paper's figure)",
                Line(MEAN_OF_VALUES, None, None),
                best,
            ),
        ]
    return [_judged(found, *claim) for claim in claims]


def _judged(found: Samples, claim: str, above: Line, below: Line) -> Finding:
    """A claim that the ratio of two errors is above 1 at every norm."""
    ratios = {
        norm: middle([lines[above][sample] / lines[below][sample] for sample in common])
        for norm, lines in found.items()
        if (common := lines.get(above, {}).keys() & lines.get(below, {}).keys())
    }
    texts = "; ".join(
        f"{one.median:.2g} ({one.low:.2g} to {one.high:.2g}) at norm {norm:g}" for norm, one in ratios.items()
    )
    count = min((one.samples for one in ratios.values()), default=0)
    measured = f"the error of ({above}) over that of ({below}): {texts}; median and 95 % interval of {count}"
    answers = {
        f"norm {norm:g}": one.low > 1 if one.low > 1 or one.high < 1 else None for norm, one in ratios.items()
    }
    return Finding(claim, measured if ratios else "nothing was measured", of_all(answers))
