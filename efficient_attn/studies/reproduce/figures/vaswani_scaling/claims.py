"""Section 3.2.1 of Vaswani et al. 2017 as data: the mechanisms, the records of one, and the claims."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import mean

from efficient_attn.runner.record import Record
from efficient_attn.stats.verdicts import (
    FAILS,
    HOLDS,
    NOT_MEASURABLE,
    Finding,
    cost,
    costs_less,
    of_all,
    span,
)

UNSCALED, SCALED, ADDITIVE = "dot product", "scaled dot product", "additive"
MECHANISMS = (UNSCALED, SCALED, ADDITIVE)

# Subjects of cases: statistics of scores, and the task that is learnt.
SCORES, LOOKUP = "scores", "lookup"

# Independent scores behind a variance.
PAIRS = 2**14

# Standard errors of a variance that chance exceeds once in 16 000.
_STANDARD_ERRORS = 4

# Records of a mechanism by d_k; of trainings one for each seed.
ByDim = dict[int, list[Record]]


def records_of(records: Sequence[Record], label: str, kind: str) -> ByDim:
    """Records of one kind of a mechanism, in ascending order of d_k."""
    found: ByDim = {}
    for record in records:
        if record.status == "ok" and record.case.label == label and record.case.kind == kind:
            found.setdefault(record.case.head_dim, []).append(record)
    return dict(sorted(found.items()))


def values(records: Sequence[Record], label: str, kind: str, quantity: str) -> dict[int, float]:
    """A quantity of a mechanism by d_k, mean over seeds."""
    return {
        dim: mean(getattr(record, quantity) for record in found)
        for dim, found in records_of(records, label, kind).items()
    }


def findings(records: Sequence[Record]) -> list[Finding]:
    """A verdict on every claim, in the order of the section."""
    return [
        _cheaper(records, "time", "faster"),
        _cheaper(records, "memory", "more space-efficient"),
        _more_accurate(records),
        _variance(records),
        _vanishing(records),
        _constant(records),
    ]


def _cheaper(records: Sequence[Record], kind: str, better: str) -> Finding:
    claim = f"Dot-product attention is {better} than additive attention (section 3.2.1)"
    dot, additive = (records_of(records, label, kind) for label in (SCALED, ADDITIVE))
    both = sorted(dot.keys() & additive.keys())
    ratios = [cost(additive[dim][0]) / (cost(dot[dim][0]) or 1.0) for dim in both]
    answers = {f"d_k = {dim}": costs_less(dot[dim][0], additive[dim][0]) for dim in both}
    return Finding(claim, f"additive attention takes {span(ratios)} times as much {kind}", of_all(answers))


def _more_accurate(records: Sequence[Record]) -> Finding:
    claim = (
        "Additive attention outperforms dot-product attention without scaling for large d_k, and both "
        "perform similarly for small d_k (section 3.2.1, after Britz et al. 2017)"
    )
    lines = {label: records_of(records, label, "recall") for label in MECHANISMS}
    dims = sorted(set.intersection(*(set(line) for line in lines.values())))
    if len(dims) < 2:
        return Finding(claim, "too few values of d_k were trained", NOT_MEASURABLE)
    measured = "; ".join(
        f"{label} " + ", ".join(f"{_accuracies(line, dim)} at d_k = {dim}" for dim in (dims[0], dims[-1]))
        for label, line in lines.items()
    )
    few, many = (_above(lines[ADDITIVE][dim], lines[UNSCALED][dim]) for dim in (dims[0], dims[-1]))
    answers = {f"d_k = {dims[0]}: they differ": few is None, f"d_k = {dims[-1]}": many}
    return Finding(claim, f"accuracy (least to largest of the seeds): {measured}", of_all(answers))


def _above(ours: Sequence[Record], others: Sequence[Record]) -> bool | None:
    """Whether every seed is more accurate than every one of the others; None if their ranges overlap."""
    one, other = ([record.accuracy for record in found] for found in (ours, others))
    return True if min(one) > max(other) else False if max(one) < min(other) else None


def _accuracies(line: Mapping[int, Sequence[Record]], dim: int) -> str:
    return span([record.accuracy for record in line[dim]])


def _variance(records: Sequence[Record]) -> Finding:
    claim = "q·k has the variance d_k if entries of q and k are independent with variance 1 (footnote 4)"
    found = values(records, UNSCALED, "count", "score_variance")
    # The excess kurtosis of a sum of d products of two normal variables is 6 / d.
    answers = {
        f"d_k = {dim}": abs(variance / dim - 1) <= _STANDARD_ERRORS * ((2 + 6 / dim) / PAIRS) ** 0.5
        for dim, variance in found.items()
    }
    measured = f"{span([variance / dim for dim, variance in found.items()])} of d_k from {PAIRS} pairs"
    return Finding(claim, measured, of_all(answers))


def _vanishing(records: Sequence[Record]) -> Finding:
    claim = (
        "Without 1/√d_k large products push softmax where its gradients are extremely small (section 3.2.1)"
    )
    found = list(values(records, UNSCALED, "count", "softmax_gradient").items())
    answers = {f"d_k = {dim}": gradient < before for (_, before), (dim, gradient) in pairwise(found)}
    measured = (
        f"the trace of the gradient of softmax, from d_k = {found[0][0]} on: {_list(found)}" if found else "–"
    )
    return Finding(claim, measured, of_all(answers))


def _constant(records: Sequence[Record]) -> Finding:
    claim = "The factor 1/√d_k counteracts this (section 3.2.1)"
    found = values(records, SCALED, "count", "softmax_gradient")
    plain = values(records, UNSCALED, "count", "softmax_gradient")
    if not found:
        return Finding(claim, "nothing was measured", NOT_MEASURABLE)
    held = min(found.values()) > max(plain.values(), default=0.0)
    measured = f"the trace of the gradient with the factor: {_list(list(found.items()))}"
    return Finding(claim, measured, HOLDS if held else FAILS)


def _list(found: Sequence[tuple[int, float]]) -> str:
    return ", ".join(f"{value:.2g}" for _, value in found)
