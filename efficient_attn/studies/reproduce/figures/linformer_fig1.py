"""Figure 1 of Wang et al. 2020: cumulative singular values of the attention matrices of a trained encoder.

The paper draws the sum of the first i singular values over the sum of all. An error follows from their
squares: the relative error of the best matrix of rank i is the root of the share of the squares of the rest.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import combinations
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from efficient_attn.report.figures import Axis, Chart, Plot, Series
from efficient_attn.report.palette import MUTED
from efficient_attn.report.table import Table
from efficient_attn.runner.record import Case, Record
from efficient_attn.runner.worker import answer
from efficient_attn.stats.median import middle
from efficient_attn.stats.verdicts import Finding, of_all
from efficient_attn.studies.plan import Plan, Point
from efficient_attn.studies.reproduce.figures import Setting

TITLE = "Figure 1: normalised cumulative singular values of attention matrices, by layer and head"
PAPER = "Wang et al. 2020, Linformer: Self-Attention with Linear Complexity, https://arxiv.org/abs/2006.04768"

_HEADS, _HEAD_DIM, _TOKENS, _QUICK_TOKENS = 12, 32, 512, 64

# Shipped layers of the first text, with their colours.
_LAYERS = {0: "#d98c00", 1: "#0072b2", 5: "#7b4fb5"}

# The heat map of the paper is at index 128 of 512; "most" of a sum is more than half of it.
_FRACTION, _MOST = 1 / 4, 0.5

# At this relative error an output is closer to the exact one than random features come on these inputs.
_SMALL = 0.1

# Label of the records; runs before hold matrices with shuffled rows and of other texts too.
_LABEL = "attention"

Values = NDArray[np.float64]

# By layer and head.
Spectra = dict[int, dict[int, Values]]


def plan(setting: Setting) -> Plan:
    """Layer by layer."""
    tokens = _QUICK_TOKENS if setting.quick else _TOKENS
    cases = [case_of(layer, head, tokens, setting.threads) for layer in _LAYERS for head in range(_HEADS)]
    return Plan(
        points=[
            Point(case=case, measure=partial(answer, case, partial(_measured, case)), label=case.inputs)
            for case in cases
        ]
    )


def case_of(layer: int, head: int, tokens: int, threads: int) -> Case:
    """The case of a head."""
    return Case(
        kind="count",
        backend="exact",
        label=_LABEL,
        options={"layer": layer, "head": head},
        of="weights",
        num_heads=_HEADS,
        head_dim=_HEAD_DIM,
        tokens=tokens,
        dtype="float64",
        device="cpu",
        threads=threads,
        inputs=f"encoder(layer={layer}, head={head})",
    )


def _measured(case: Case) -> Record:
    """The singular values of one head."""
    import torch

    values = torch.linalg.svdvals(_weights(case.options["layer"], case.tokens)[case.options["head"]])
    # Five digits suffice for everything that is drawn, and keep the file small.
    return Record(case=case, singular_values=tuple(float(f"{value:.5g}") for value in values.tolist()))


@lru_cache(maxsize=1)
def _weights(layer: int, tokens: int) -> Any:
    """The attention matrices of all heads."""
    from efficient_attn.measure.inputs import shipped
    from efficient_attn.ops.softmax.definition import softmax_weights

    captured = shipped()
    q, k = (x[..., :tokens, :].double() for x in captured.layers[layer][:2])
    return softmax_weights(q, k, scale=captured.scale or q.shape[-1] ** -0.5, key_mask=None)[0]


def spectra(records: Sequence[Record]) -> Spectra:
    """Singular values by layer and head, in ascending order."""
    found: Spectra = {layer: {} for layer in _LAYERS}
    for record in records:
        options = record.case.options
        ours = record.case.label == _LABEL and options.get("layer") in found and not options.get("text")
        if ours and record.singular_values:
            found[options["layer"]][int(options["head"])] = np.asarray(record.singular_values)
    return {layer: heads for layer, heads in found.items() if heads}


def index_of(values: Values) -> int:
    """Number of singular values at the paper's fraction."""
    return max(round(len(values) * _FRACTION), 1)


def share(values: Values) -> float:
    """The height of the cumulative curve at the paper's fraction of the index."""
    return float(values[: index_of(values)].sum() / values.sum())


def least_error(values: Values) -> float:
    """‖P − P_r‖ / ‖P‖ of the best matrix of that rank, in the Frobenius norm (Eckart and Young 1936)."""
    squares = values**2
    return float(np.sqrt(squares[index_of(values) :].sum() / squares.sum()))


def tables(records: Sequence[Record]) -> list[Table]:
    """One row for each layer: medians over heads, from the least to the largest."""
    found = spectra(records)
    body = [
        (f"layer {layer}", *(_show(list(map(one, heads.values()))) for one in (share, least_error)))
        for layer, heads in found.items()
    ]
    index, tokens = _sizes(found)
    columns = ("matrix", f"share of the first {index} of {tokens}", "error of the best matrix of that rank")
    note = (
        "Medians over 12 heads (least to largest), in float64, of the shipped activations of "
        "all-MiniLM-L6-v2, layers counted from 0 to 5; the paper has RoBERTa and prints no numbers."
    )
    return [Table(TITLE, columns, tuple(body), (note,))]


def draw(records: Sequence[Record]) -> Plot:
    """The cumulative curves of each layer."""
    found = spectra(records)
    index, tokens = _sizes(found)
    series = []
    for layer, heads in found.items():
        sums = np.cumsum(list(heads.values()), axis=1)
        lines = np.insert(sums / sums[:, -1:], 0, 0.0, axis=1)
        centre, low, high = (edge(lines, axis=0).tolist() for edge in (np.median, np.min, np.max))
        style = {"color": _LAYERS[layer], "linewidth": 2.0}
        series.append(Series(f"layer {layer}", range(len(centre)), centre, style, low, high))
    edge = Series("", (index,), (), {"color": MUTED, "linewidth": 0.8, "linestyle": (0, (4, 3))}, entry="")
    curves = Chart(
        Axis("index of the singular value", show="{:.0f}".format, limits=(0, tokens)),
        Axis("normalised cumulative singular values", limits=(0, 1.02)),
        (*series, edge),
    )
    conditions = "medians over heads of one text; bands: from the least to the largest head"
    return Plot("Spectra of attention matrices", conditions, ((curves,),) if series else ())


def _sizes(found: Spectra) -> tuple[int, int]:
    """The paper's index, and the number of singular values."""
    values = next((values for heads in found.values() for values in heads.values()), np.ones(1))
    return index_of(values), len(values)


def findings(records: Sequence[Record]) -> list[Finding]:
    """A verdict on every claim."""
    found = spectra(records)
    shares = {layer: list(map(share, heads.values())) for layer, heads in found.items()}
    errors = {layer: list(map(least_error, heads.values())) for layer, heads in found.items()}
    index, tokens = _sizes(found)
    heads_above = {
        f"head {head} of layer {layer}": share(values) > _MOST
        for layer, heads in found.items()
        for head, values in heads.items()
    }
    skewed = {
        f"layer {higher} is compared with {lower}": _is_above(shares[higher], shares[lower])
        for lower, higher in combinations(found, 2)
    }
    small = {f"layer {layer}": median(heads) < _SMALL for layer, heads in errors.items()}
    measured = f"shares of the first {index} of {tokens}, medians over heads: {_by_layer(shares)}"
    error = f"relative error of the best matrix of that rank, medians over heads: {_by_layer(errors)}"
    return [
        Finding(
            "Most of an attention matrix is in its largest singular values: 128 of 512 (figure 1)",
            measured,
            of_all(heads_above),
        ),
        Finding(
            "The spectrum of higher layers is more skewed than that of lower ones (figure 1)",
            measured,
            of_all(skewed),
        ),
        Finding(
            "A rank of 128 of 512 approximates attention matrices (section 3); here: to 10 % in every layer",
            error,
            of_all(small),
        ),
    ]


def _is_above(these: Sequence[float], others: Sequence[float]) -> bool | None:
    """Whether the median of these heads is above that of others; None if their intervals overlap."""
    one, other = middle(these), middle(others)
    return None if one.low <= other.high and other.low <= one.high else one.low > other.high


def _show(values: Sequence[float]) -> str:
    """The median over heads, the least and the largest."""
    return f"{median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def _by_layer(values: Mapping[int, Sequence[float]]) -> str:
    return "; ".join(f"{_show(heads)} in layer {layer}" for layer, heads in values.items()) or "none"
