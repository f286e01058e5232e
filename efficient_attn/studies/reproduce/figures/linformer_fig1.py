"""Figure 1 of Wang et al. 2020: cumulative singular values of the attention matrices of a trained encoder.

The paper draws the sum of the first i singular values over the sum of all. An error follows from their
squares: the relative error of the best matrix of rank i is the root of the share of the squares of the rest.
"""

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from efficient_attn.report.figures import Axis, Chart, Plot, Series
from efficient_attn.report.palette import MUTED
from efficient_attn.report.table import Table
from efficient_attn.runner.record import Case, Record
from efficient_attn.runner.worker import answer
from efficient_attn.stats.median import Middle, middle
from efficient_attn.stats.verdicts import Finding, of_all, span
from efficient_attn.studies.plan import Plan, Point
from efficient_attn.studies.reproduce.figures import Setting

TITLE = "Figure 1: normalised cumulative singular values of attention matrices, by layer and head"
PAPER = "Wang et al. 2020, Linformer: Self-Attention with Linear Complexity, https://arxiv.org/abs/2006.04768"

_HEADS, _HEAD_DIM, _TOKENS, _QUICK_TOKENS = 12, 32, 512, 64

# Shipped samples: three layers of the first text, and the middle layer of the others.
_PLACES = ((0, 0), (1, 0), (5, 0), (1, 1), (1, 2), (1, 3))
_COLOURS = {0: "#d98c00", 1: "#0072b2", 5: "#7b4fb5"}

# The heat map of the paper is at index 128 of 512; "most" of a sum is more than half of it.
_FRACTION, _MOST = 1 / 4, 0.5

# At this relative error an output is closer to the exact one than random features come on these inputs.
_SMALL = 0.1

# Label of the records; runs before hold matrices with shuffled rows too.
_LABEL = "attention"

Values = NDArray[np.float64]

# By layer and text: the singular values of each head.
Spectra = dict[tuple[int, int], dict[int, Values]]


class Head(NamedTuple):
    """A head of a layer on a text."""

    text: int
    layer: int
    head: int


def plan(setting: Setting) -> Plan:
    """Layer by layer, text by text."""
    tokens = _QUICK_TOKENS if setting.quick else _TOKENS
    cases = [
        case_of(Head(text, layer, head), tokens, setting.threads)
        for layer, text in _PLACES
        for head in range(_HEADS)
    ]
    return Plan(
        points=[
            Point(case=case, measure=partial(answer, case, partial(_measured, case)), label=case.inputs)
            for case in cases
        ]
    )


def case_of(head: Head, tokens: int, threads: int) -> Case:
    """The case of a head."""
    return Case(
        kind="count",
        backend="exact",
        label=_LABEL,
        options=head._asdict(),
        of="weights",
        num_heads=_HEADS,
        head_dim=_HEAD_DIM,
        tokens=tokens,
        dtype="float64",
        device="cpu",
        threads=threads,
        inputs=f"encoder(layer={head.layer}, text={head.text}, head={head.head})",
    )


def _measured(case: Case) -> Record:
    """The singular values of one head."""
    import torch

    head = _head_of(case)
    values = torch.linalg.svdvals(_weights(head.text, head.layer, case.tokens)[head.head])
    # Five digits suffice for everything that is drawn, and keep the file small.
    return Record(case=case, singular_values=tuple(float(f"{value:.5g}") for value in values.tolist()))


@lru_cache(maxsize=1)
def _weights(text: int, layer: int, tokens: int) -> Any:
    """The attention matrices of all heads."""
    from efficient_attn.measure.inputs import shipped
    from efficient_attn.ops.softmax.definition import softmax_weights

    captured = shipped(text)
    q, k = (x[..., :tokens, :].double() for x in captured.layers[layer][:2])
    return softmax_weights(q, k, scale=captured.scale or q.shape[-1] ** -0.5, key_mask=None)[0]


def _head_of(case: Case) -> Head:
    return Head(*(int(case.options[name]) for name in Head._fields))


def spectra(records: Sequence[Record]) -> Spectra:
    """Singular values by layer, text and head, in ascending order."""
    found = {
        _head_of(record.case): np.asarray(record.singular_values)
        for record in records
        if record.status == "ok" and record.case.label == _LABEL and record.singular_values
    }
    made: Spectra = {}
    for (text, layer, head), values in sorted(found.items(), key=lambda item: (item[0].layer, item[0])):
        made.setdefault((layer, text), {})[head] = values
    return made


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
    """One row for each layer and text: medians over heads, from the least to the largest."""
    found = spectra(records)
    body = []
    for (layer, text), heads in found.items():
        measures = (list(map(measured, heads.values())) for measured in (share, least_error))
        cells = (f"{middle(one).median:.3g} ({min(one):.3g} to {max(one):.3g})" for one in measures)
        body.append((f"layer {layer}, text {text}", *cells))
    index, tokens = _sizes(found)
    columns = ("matrix", f"share of the first {index} of {tokens}", "error of the best matrix of that rank")
    note = (
        "Medians over 12 heads (least to largest), in float64, of the shipped activations of "
        "all-MiniLM-L6-v2, layers counted from 0 to 5; the paper has RoBERTa and prints no numbers."
    )
    return [Table(TITLE, columns, tuple(body), (note,))]


def draw(records: Sequence[Record]) -> Plot:
    """The cumulative curves of each layer on the first text."""
    found = spectra(records)
    index, tokens = _sizes(found)
    series = []
    for (layer, text), heads in found.items():
        if text == 0:
            sums = np.cumsum(list(heads.values()), axis=1)
            lines = np.insert(sums / sums[:, -1:], 0, 0.0, axis=1)
            middle_, low, high = (edge(lines, axis=0).tolist() for edge in (np.median, np.min, np.max))
            style = {"color": _COLOURS[layer], "linewidth": 2.0}
            series.append(Series(f"layer {layer}", range(len(middle_)), middle_, style, low, high))
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
    return [_low_rank(found), _more_skewed(found), _small_error(found)]


def _low_rank(found: Spectra) -> Finding:
    """A quarter of the singular values have more than half of their sum, in every head."""
    claim = "Most of an attention matrix is in its largest singular values: 128 of 512 (figure 1)"
    texts, answers = [], dict[str, bool]()
    for (layer, text), heads in found.items():
        shares = {head: share(values) for head, values in heads.items()}
        texts.append(f"{span([*shares.values()])} in layer {layer}, text {text}")
        for head, one in shares.items():
            place = f"head {head} of layer {layer}"
            answers[place] = answers.get(place, True) and one > _MOST
    index, tokens = _sizes(found)
    measured = f"shares of the first {index} of {tokens}: {'; '.join(texts) or 'none'}"
    return Finding(claim, measured, of_all(answers))


def _more_skewed(found: Spectra) -> Finding:
    """Heads of the higher of two layers have larger shares on one text."""
    claim = "The spectrum of higher layers is more skewed than that of lower ones (figure 1)"
    shares = {layer: list(map(share, heads.values())) for (layer, text), heads in found.items() if text == 0}
    medians = (f"{_interval(middle(one), '.3f')} in layer {layer}" for layer, one in shares.items())
    answers = {
        f"layer {higher} is held against {lower}": _above(shares[higher], shares[lower])
        for lower, higher in combinations(sorted(shares), 2)
    }
    measured = f"medians over heads of one text: {'; '.join(medians) or 'none'}"
    return Finding(claim, measured, of_all(answers))


def _small_error(found: Spectra) -> Finding:
    """The error of the best matrix of that rank, which the share does not determine."""
    claim = "A rank of 128 of 512 approximates attention matrices (section 3); here: to 10 % in every layer"
    errors = {
        f"layer {layer}, text {text}": middle(list(map(least_error, heads.values())))
        for (layer, text), heads in found.items()
    }
    answers = {
        place: one.high < _SMALL if (one.high < _SMALL) == (one.low < _SMALL) else None
        for place, one in errors.items()
    }
    texts = "; ".join(f"{_interval(one, '.2g')} in {place}" for place, one in errors.items())
    measured = f"relative error of the best matrix of that rank, medians over heads: {texts or 'none'}"
    return Finding(claim, measured, of_all(answers))


def _interval(one: Middle, digits: str) -> str:
    return f"{one.median:{digits}} ({one.low:{digits}} to {one.high:{digits}})"


def _above(one: Sequence[float], other: Sequence[float]) -> bool | None:
    """Whether one layer's heads are above another's, at 5 % by Mann and Whitney's U (1947)."""
    pairs = [(a > b) + (a == b) / 2 for a in one for b in other]
    deviation = math.sqrt(len(pairs) * (len(one) + len(other) + 1) / 12)
    score = (sum(pairs) - len(pairs) / 2) / deviation
    return None if abs(score) < 1.96 else score > 0
