"""Table 1 of Vaswani et al. 2017 as data: its rows, the records of a row, and the claims judged by them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from efficient_attn.report.table import show_growth
from efficient_attn.runner.records import Record
from efficient_attn.stats.growth import growth
from efficient_attn.stats.rounds import call_time, time_ratio
from efficient_attn.stats.verdicts import (
    FAILS,
    HOLDS,
    NOT_MEASURABLE,
    Finding,
    costs_less,
    of_all,
    proportional,
    span,
)
from efficient_attn.theory import complexity
from efficient_attn.theory.complexity import TABLE_1, Complexity

# Subject of a case: times, counted operations, gradients.
TIME, OPERATIONS, PATH = "mixer", "operations", "path"

SELF_ATTENTION, RECURRENT = "self-attention", "recurrent"

# Numbers of one length are proportional to any order.
_FEWEST_LENGTHS = 2
_ONE_LENGTH = "measured at one length"

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


def cells(records: Sequence[Record], label: str, of: str) -> dict[tuple[int, int], Record]:
    """Records of a row, in ascending order of tokens and width."""
    found = {
        (record.case.tokens, record.case.model_dim): record
        for record in records
        if record.status == "ok" and record.case.label == label and record.case.of == of
    }
    return dict(sorted(found.items()))


def by_tokens(found: Cells) -> dict[int, Record]:
    """Cells of the width that was measured at most lengths, by tokens."""
    lines: dict[int, dict[int, Record]] = {}
    for (tokens, width), record in found.items():
        lines.setdefault(width, {})[tokens] = record
    return max(lines.values(), key=len, default={})


def findings(records: Sequence[Record]) -> list[Finding]:
    """A verdict on every claim, the rows of the table first."""
    waiting = "A recurrent layer does O(n) operations one after the other, all others O(1) (Table 1)"
    paths = (
        "The longest path is O(1) in self-attention, O(n) in a recurrent layer, O(log_k n) in dilated and "
        "O(n/k) in contiguous convolutions, O(n/r) in restricted self-attention (Table 1 and section 4)"
    )
    chain, hops = "the longest chain of dependent matrix products", "hops from the last token to the first"
    return [
        *(cost(records, label) for label in ROWS),
        grows_as_printed(records, waiting, OPERATIONS, "sequential_operations", chain),
        grows_as_printed(records, paths, PATH, "path_length", hops),
        faster_than_recurrent(records),
    ]


def cost(records: Sequence[Record], label: str) -> Finding:
    """Operations are a constant multiple of the printed order; the growth of the time has no verdict."""
    order = TABLE_1[label].per_layer
    claim = f"A {label} layer costs O({order}) (Table 1)"
    flops = {place: record.flops or 0 for place, record in cells(records, label, OPERATIONS).items()}
    if not flops or not all(flops.values()):
        return Finding(claim, "no operations were counted", NOT_MEASURABLE)
    if len({n for n, _ in flops}) < _FEWEST_LENGTHS:
        return Finding(claim, _ONE_LENGTH, NOT_MEASURABLE)
    measured = f"{multiples(records, label)} operations for each {order}; time: {time_growth(records, label)}"
    held = proportional(list(flops.values()), [ROWS[label].order(n, d) for n, d in flops])
    return Finding(claim, measured, HOLDS if held else FAILS)


def grows_as_printed(records: Sequence[Record], claim: str, of: str, quantity: str, measure: str) -> Finding:
    """In every row paths have the exact length behind the printed order; chains are a multiple of it."""
    counts = {
        label: {n: getattr(record, quantity) or 0 for n, record in line.items()}
        for label in ROWS
        if (line := by_tokens(cells(records, label, of)))
    }
    if counts.keys() != ROWS.keys():
        return Finding(claim, "not all rows were measured", NOT_MEASURABLE)
    if min(map(len, counts.values())) < _FEWEST_LENGTHS:
        return Finding(claim, _ONE_LENGTH, NOT_MEASURABLE)
    wrong = []
    for label, lengths in counts.items():
        row = ROWS[label]
        orders = [getattr(row.theory(n, 1, **row.options), quantity) for n in lengths]
        found = [*lengths.values()]
        if not all(found) or not (found == orders if of == PATH else proportional(found, orders)):
            wrong.append(label)
    shown = ", ".join(f"{lengths[max(lengths)]} {label}" for label, lengths in counts.items())
    measured = f"{measure}, at the most tokens: {shown}"
    return Finding(claim, measured, f"{FAILS}: {', '.join(wrong)}" if wrong else HOLDS)


def faster_than_recurrent(records: Sequence[Record]) -> Finding:
    """Wherever there are fewer tokens than entries of one, attention takes less time."""
    claim = "Self-attention is faster than a recurrent layer where n is smaller than d (section 4)"
    own, its = (cells(records, label, TIME) for label in (SELF_ATTENTION, RECURRENT))
    gains = {place: time_ratio(own[place], its[place]).median for place in own.keys() & its.keys()}
    few, many = ([gain for (n, d), gain in gains.items() if (n < d) == small] for small in (True, False))
    answers = {f"n = {n}, d = {d}": costs_less(own[n, d], its[n, d]) for n, d in sorted(gains) if n < d}
    measured = f"{span(few)} times as fast where n < d; {span(many)} times where n ≥ d"
    return Finding(claim, measured if few else "nothing was timed with n smaller than d", of_all(answers))


def time_growth(records: Sequence[Record], label: str) -> str:
    """Growth of the time of a row with its tokens: `n^1.98 (1.95 to 2.01)`, or `unclear`."""
    line = by_tokens(cells(records, label, TIME))
    fit = growth(list(line), [call_time(record).median for record in line.values()])
    return show_growth(fit) or "unclear"


def multiples(records: Sequence[Record], label: str) -> str:
    """Operations per unit of the printed order: `4`, or `3.9 to 4`."""
    counted = cells(records, label, OPERATIONS)
    shares = [(record.flops or 0) / ROWS[label].order(*place) for place, record in counted.items()]
    return " to ".join(dict.fromkeys(f"{edge:.3g}" for edge in (min(shares), max(shares)))) if shares else "–"
