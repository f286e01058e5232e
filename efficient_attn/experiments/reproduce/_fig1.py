"""Figure 1 of Wang et al. 2020 as data: singular values of attention matrices, head by head.

The paper draws the sum of the first i singular values over the sum of all. The error of the best matrix of
rank i is the root of the share of the squares of the remaining singular values.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from efficient_attn.sweep.records import Case, Record

# The heat map of the paper is at index 128 of 512.
FRACTION = 1 / 4

# The matrix itself, or the weights of every row in random order.
REAL, SHUFFLED = "attention", "shuffled rows"


class Head(NamedTuple):
    """A head of a layer on a text."""

    text: int
    layer: int
    head: int

    @property
    def inputs(self) -> str:
        """Name of the inputs in records."""
        return f"encoder(layer={self.layer}, text={self.text}, head={self.head})"


def head_of(case: Case) -> Head:
    """The head that a case is about."""
    options = case.options
    return Head(int(options["text"]), int(options["layer"]), int(options["head"]))


def spectra(records: Sequence[Record], matrix: str) -> dict[Head, NDArray[np.float64]]:
    """Singular values by head, of attention matrices or of the same with shuffled rows."""
    found = {
        head_of(record.case): np.asarray(record.singular_values)
        for record in records
        if record.status == "ok" and record.case.label == matrix and record.singular_values
    }
    return dict(sorted(found.items()))


def cumulative(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sums of the first 1, 2, … singular values, over the sum of all."""
    return np.cumsum(values) / values.sum()


def index_of(values: NDArray[np.float64]) -> int:
    """How many singular values the paper's fraction is."""
    return max(round(len(values) * FRACTION), 1)


def share(values: NDArray[np.float64]) -> float:
    """The height of the cumulative curve at the paper's fraction of the index."""
    return float(cumulative(values)[index_of(values) - 1])


def least_error(values: NDArray[np.float64]) -> float:
    """‖P − P_r‖ / ‖P‖ of the best matrix of that rank, in the Frobenius norm (Eckart and Young 1936)."""
    squares = values**2
    return float(np.sqrt(squares[index_of(values) :].sum() / squares.sum()))


def needed(values: NDArray[np.float64], wanted: float = 0.9) -> int:
    """How many singular values have this share of the sum."""
    return int(np.searchsorted(cumulative(values), wanted) + 1)


def layers(found: dict[Head, NDArray[np.float64]]) -> dict[tuple[int, int], list[NDArray[np.float64]]]:
    """The heads of each layer and text: {(layer, text): spectra}."""
    made: dict[tuple[int, int], list[NDArray[np.float64]]] = {}
    for head, values in sorted(found.items(), key=lambda item: (item[0].layer, item[0])):
        made.setdefault((head.layer, head.text), []).append(values)
    return made
