"""Figure 1 and section 3 of Wang et al. 2020 judged by records: singular values of attention matrices.

The paper draws the sum of the first i singular values over the sum of all. An error follows from their
squares: the relative error of the best matrix of rank i is the root of the share of the squares of the rest.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from efficient_attn.runner.record import Case, Record
from efficient_attn.stats.median import Middle, middle
from efficient_attn.stats.verdicts import FAILS, HOLDS, NOT_MEASURABLE, Finding, of_all, span, turns_round

# The heat map of the paper is at index 128 of 512; "most" of a sum is more than half of it.
FRACTION, _MOST = 1 / 4, 0.5

# At this relative error an output is closer to the exact one than random features come on these inputs.
_SMALL = 0.1

# The matrix as it is, or with the weights of every row in a random order.
REAL, SHUFFLED = "attention", "shuffled rows"

Values = NDArray[np.float64]


class Head(NamedTuple):
    """A head of a layer on a text."""

    text: int
    layer: int
    head: int

    @property
    def inputs(self) -> str:
        """Name in records."""
        return f"encoder(layer={self.layer}, text={self.text}, head={self.head})"


def head_of(case: Case) -> Head:
    """The head of a case."""
    return Head(*(int(case.options[name]) for name in Head._fields))


def spectra(records: Sequence[Record], matrix: str) -> dict[Head, Values]:
    """Singular values by head, of attention matrices or of the same with shuffled rows."""
    found = {
        head_of(record.case): np.asarray(record.singular_values)
        for record in records
        if record.status == "ok" and record.case.label == matrix and record.singular_values
    }
    return dict(sorted(found.items()))


def layers(found: Mapping[Head, Values]) -> dict[tuple[int, int], list[Values]]:
    """The heads of each layer and text: {(layer, text): spectra}."""
    made: dict[tuple[int, int], list[Values]] = {}
    for head, values in sorted(found.items(), key=lambda item: (item[0].layer, item[0])):
        made.setdefault((head.layer, head.text), []).append(values)
    return made


def cumulative(values: Values) -> Values:
    """The sums of the first 1, 2, … singular values, over the sum of all."""
    return np.cumsum(values) / values.sum()


def index_of(values: Values) -> int:
    """Number of singular values at the paper's fraction."""
    return max(round(len(values) * FRACTION), 1)


def share(values: Values) -> float:
    """The height of the cumulative curve at the paper's fraction of the index."""
    return float(cumulative(values)[index_of(values) - 1])


def least_error(values: Values) -> float:
    """‖P − P_r‖ / ‖P‖ of the best matrix of that rank, in the Frobenius norm (Eckart and Young 1936)."""
    squares = values**2
    return float(np.sqrt(squares[index_of(values) :].sum() / squares.sum()))


def needed(values: Values, wanted: float = 0.9) -> int:
    """Number of singular values with this share of the sum."""
    return int(np.searchsorted(cumulative(values), wanted) + 1)


def findings(records: Sequence[Record]) -> list[Finding]:
    """A verdict on every claim."""
    return [_low_rank(records), _more_skewed(records), _small_error(records), _more_than_flat(records)]


def _low_rank(records: Sequence[Record]) -> Finding:
    """A quarter of the singular values have more than half of their sum, in every head."""
    found = spectra(records, REAL)
    claim = "Most of an attention matrix is in its largest singular values: 128 of 512 (figure 1)"
    if not found:
        return Finding(claim, "no matrix was measured", NOT_MEASURABLE)
    first = next(iter(found.values()))
    text = f"shares of the first {index_of(first)} of {len(first)}: " + "; ".join(
        f"{span([share(values) for values in heads])} in layer {layer}, text {text}"
        for (layer, text), heads in layers(found).items()
    )
    wrong = [head for head, values in found.items() if share(values) <= _MOST]
    if len(wrong) in (0, len(found)):
        return Finding(claim, text, FAILS if wrong else HOLDS)
    places = ", ".join(
        f"head {head} of layer {layer}" + (f" ({count} texts)" if count > 1 else "")
        for (layer, head), count in sorted(Counter((head.layer, head.head) for head in wrong).items())
    )
    return Finding(claim, text, turns_round(f"it is {places}, of {len(found)} heads and texts"))


def _more_skewed(records: Sequence[Record]) -> Finding:
    """Heads of the higher of two layers have larger shares on one text."""
    claim = "The spectrum of higher layers is more skewed than that of lower ones (figure 1)"
    groups = layers(spectra(records, REAL))
    shares = {layer: list(map(share, heads)) for (layer, text), heads in groups.items() if text == 0}
    if len(shares) < 2:
        return Finding(claim, "no two layers of one text were measured", NOT_MEASURABLE)
    medians = (f"{_interval(middle(found), '.3f')} in layer {layer}" for layer, found in shares.items())
    answers = {
        f"layer {higher} is held against {lower}": _above(shares[higher], shares[lower])
        for lower, higher in combinations(sorted(shares), 2)
    }
    return Finding(claim, f"medians over heads of one text: {'; '.join(medians)}", of_all(answers))


def _small_error(records: Sequence[Record]) -> Finding:
    """The error of the best matrix of that rank, which the share does not tell."""
    claim = "A rank of 128 of 512 approximates attention matrices (section 3); here: to 10 % in every layer"
    found = {
        f"layer {layer}, text {text}": middle(list(map(least_error, heads)))
        for (layer, text), heads in layers(spectra(records, REAL)).items()
    }
    text = "; ".join(f"{_interval(one, '.2g')} in {place}" for place, one in found.items())
    text = f"relative error of the best matrix of that rank, medians over heads: {text}"
    return _judged(claim, found, text, "no matrix was measured", lambda value: value < _SMALL)


def _more_than_flat(records: Sequence[Record]) -> Finding:
    """The same weights in a random order of each row have no less of their sum in the rest."""
    claim = "The low rank comes from what rows share, not from each being flat (not in the paper)"
    real, shuffled = spectra(records, REAL), spectra(records, SHUFFLED)
    gains: dict[int, list[float]] = {}
    for head in sorted(real.keys() & shuffled.keys()):
        gains.setdefault(head.layer, []).append(share(real[head]) - share(shuffled[head]))
    found = {f"layer {layer}": middle(gain) for layer, gain in sorted(gains.items())}
    text = "; ".join(
        f"the share is {_interval(one, '.3f')} above that of shuffled rows in {place}"
        for place, one in found.items()
    )
    missing = "no matrix was measured with its rows shuffled"
    return _judged(claim, found, text, missing, lambda value: value > 0)


def _judged(
    claim: str, found: Mapping[str, Middle], text: str, missing: str, right: Callable[[float], bool]
) -> Finding:
    """A claim that medians are on one side, by their intervals."""
    if not found:
        return Finding(claim, missing, NOT_MEASURABLE)
    edges = {place: {right(one.low), right(one.high)} for place, one in found.items()}
    answers = {place: sides.pop() if len(sides) == 1 else None for place, sides in edges.items()}
    return Finding(claim, text, of_all(answers))


def _interval(one: Middle, digits: str) -> str:
    return f"{one.median:{digits}} ({one.low:{digits}} to {one.high:{digits}})"


def _above(one: Sequence[float], other: Sequence[float]) -> bool | None:
    """Whether one layer's heads are above another's, at 5 % by Mann and Whitney's U (1947)."""
    pairs = [(a > b) + (a == b) / 2 for a in one for b in other]
    deviation = math.sqrt(len(pairs) * (len(one) + len(other) + 1) / 12)
    score = (sum(pairs) - len(pairs) / 2) / deviation
    return None if abs(score) < 1.96 else score > 0
