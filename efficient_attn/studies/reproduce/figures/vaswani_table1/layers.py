"""Table 1 of Vaswani et al. 2017 as data: its rows, and the records of a row."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from efficient_attn.runner.records import Record
from efficient_attn.theory import complexity
from efficient_attn.theory.complexity import TABLE_1, Complexity

# Subject of a case: times, counted operations, gradients.
TIME, OPERATIONS, PATH = "mixer", "operations", "path"

SELF_ATTENTION, RECURRENT = "self-attention", "recurrent"

_K, _R = 5, 65
_KERNEL, _WINDOW = {"kernel_size": _K}, {"window": _R}


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        backend: Backend of an attention layer; otherwise a name of the layer.
        theory: The row's numbers, `theory(tokens, width, **options)`.
        order: The printed complexity per layer as a function of tokens n and width d.
    """

    backend: str
    options: Mapping[str, Any]
    theory: Callable[..., Complexity]
    order: Callable[[int, int], float]


ROWS: Mapping[str, Row] = {
    SELF_ATTENTION: Row("exact", {}, complexity.self_attention, lambda n, d: n * n * d),
    RECURRENT: Row("recurrent", {}, complexity.recurrent, lambda n, d: n * d * d),
    "convolutional": Row("convolutional", _KERNEL, complexity.convolutional, lambda n, d: _K * n * d * d),
    "dilated convolutional": Row(
        "dilated", _KERNEL, complexity.dilated_convolutional, lambda n, d: _K * n * d * d
    ),
    "separable convolutional": Row(
        "separable", _KERNEL, complexity.separable_convolutional, lambda n, d: _K * n * d + n * d * d
    ),
    "restricted self-attention": Row(
        "window", _WINDOW, complexity.restricted_self_attention, lambda n, d: _R * n * d
    ),
}

# Records of one row by (tokens, width).
Cells = Mapping[tuple[int, int], Record]


def printed(label: str) -> str:
    """The complexity per layer as the paper prints it."""
    return TABLE_1[label].per_layer


def cells(records: Sequence[Record], label: str, of: str) -> dict[tuple[int, int], Record]:
    """Records of a row, in ascending order of tokens and width."""
    found = {
        (record.case.tokens, record.case.model_dim): record
        for record in records
        if record.status == "ok" and record.case.label == label and record.case.of == of
    }
    return dict(sorted(found.items()))


def along(found: Cells, axis: int) -> dict[int, Record]:
    """The longest line of cells along tokens (axis 0) or width (axis 1), by their place on it."""
    lines: dict[int, dict[int, Record]] = {}
    for place, record in found.items():
        lines.setdefault(place[1 - axis], {})[place[axis]] = record
    return max(lines.values(), key=len, default={})
