"""Table 1 of Vaswani et al. 2017 as data: its rows, and the records of a row."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from efficient_attn.runner.records import Record
from efficient_attn.theory import complexity
from efficient_attn.theory.complexity import Complexity

# Subject of a case: times, counted operations, gradients.
TIME, OPERATIONS, PATH = "mixer", "operations", "path"

SELF_ATTENTION, RECURRENT = "self-attention", "recurrent"
PROJECTED = "self-attention with projections"

KERNEL, WINDOW = 5, 65


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        backend: Backend of an attention layer; otherwise a name of the layer.
        printed: The complexity per layer as the paper prints it.
        order: The same as a function of tokens n and width d.
        theory: The row's numbers at (tokens, width).
    """

    backend: str
    options: Mapping[str, Any]
    printed: str
    order: Callable[[int, int], float]
    theory: Callable[[int, int], Complexity]


_KERNEL = {"kernel_size": KERNEL}
ROWS: Mapping[str, Row] = {
    SELF_ATTENTION: Row("exact", {}, "n²·d", lambda n, d: n * n * d, complexity.self_attention),
    # Not a row of the paper, which leaves the projections out.
    PROJECTED: Row(
        "exact", {}, "n²·d + 2n·d²", lambda n, d: n * n * d + 2 * n * d * d, complexity.self_attention
    ),
    RECURRENT: Row("recurrent", {}, "n·d²", lambda n, d: n * d * d, complexity.recurrent),
    "convolutional": Row(
        "convolutional",
        _KERNEL,
        "k·n·d²",
        lambda n, d: KERNEL * n * d * d,
        lambda n, d: complexity.convolutional(n, d, kernel_size=KERNEL),
    ),
    "dilated convolutional": Row(
        "dilated",
        _KERNEL,
        "k·n·d²",
        lambda n, d: KERNEL * n * d * d,
        lambda n, d: complexity.dilated_convolutional(n, d, kernel_size=KERNEL),
    ),
    "separable convolutional": Row(
        "separable",
        _KERNEL,
        "k·n·d + n·d²",
        lambda n, d: KERNEL * n * d + n * d * d,
        lambda n, d: complexity.separable_convolutional(n, d, kernel_size=KERNEL),
    ),
    "restricted self-attention": Row(
        "window",
        {"window": WINDOW},
        "r·n·d",
        lambda n, d: WINDOW * n * d,
        lambda n, d: complexity.restricted_self_attention(n, d, window=WINDOW),
    ),
}

# Records of one row by (tokens, width).
Cells = Mapping[tuple[int, int], Record]


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


def fixed(found: Cells, axis: int) -> int | None:
    """The width (axis 0) or the number of tokens (axis 1) of that line."""
    line = along(found, axis)
    return next((place[1 - axis] for place, record in found.items() if record in line.values()), None)
