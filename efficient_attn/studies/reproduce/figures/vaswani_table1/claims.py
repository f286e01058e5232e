"""Table 1 of Vaswani et al. 2017 as data: its rows, the records of a row, and the claims judged by them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from efficient_attn.report.table import show_growth
from efficient_attn.runner.records import Record
from efficient_attn.stats.growth import Growth, growth
from efficient_attn.stats.rounds import call_time, time_ratio
from efficient_attn.stats.verdicts import (
    FAILS,
    HOLDS,
    NOT_MEASURABLE,
    Finding,
    agrees,
    costs_less,
    of_all,
    proportional,
    span,
)
from efficient_attn.theory import complexity
from efficient_attn.theory.complexity import TABLE_1, Complexity

_AXES = ("n", "d")

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


def findings(records: Sequence[Record]) -> list[Finding]:
    """A verdict on every claim, the rows of the table first."""
    return [
        *(cost(records, label) for label in ROWS),
        waiting(records),
        paths(records),
        faster_than_recurrent(records),
    ]


def cost(records: Sequence[Record], label: str) -> Finding:
    """Operations are a constant multiple of the printed order; time grows with the same powers."""
    order = TABLE_1[label].per_layer
    claim = f"A {label} layer costs O({order}) (Table 1)"
    counted = cells(records, label, OPERATIONS)
    flops = {place: record.flops or 0 for place, record in counted.items()}
    if not flops or not all(flops.values()):
        return Finding(claim, "no operations were counted", NOT_MEASURABLE)
    fits = time_growths(records, label)
    measured = (
        f"{multiples(records, label)} operations for each {order}; time grows with {grows(fits, ' and ')}"
    )
    if not proportional(list(flops.values()), [ROWS[label].order(n, d) for n, d in flops]):
        return Finding(claim, measured, FAILS)
    expected = [
        _growth({place: r.flops or 0 for place, r in along(counted, axis).items()}) for axis in (0, 1)
    ]
    powers = [0.0 if fit is None else fit.power for fit in expected]
    agreeing = [agrees(power, fit) for power, fit in zip(powers, fits, strict=True)]
    differing = [
        f"{_grows(fit, name)} and not {name}^{power:.3g}"
        for name, power, fit, same in zip(_AXES, powers, fits, agreeing, strict=True)
        if same is False
    ]
    if differing:
        return Finding(claim, measured, f"{HOLDS} in operations; time here grows with {', '.join(differing)}")
    return Finding(claim, measured, HOLDS if all(agreeing) else f"{HOLDS} in operations")


def waiting(records: Sequence[Record]) -> Finding:
    """Chains of products of a recurrent layer are as long as the sequence, all others of one length."""
    claim = "A recurrent layer does O(n) operations one after the other, all others O(1) (Table 1)"
    chains = {
        label: {n: record.sequential_operations or 0 for n, record in line.items()}
        for label in ROWS
        if len(line := along(cells(records, label, OPERATIONS), 0)) > 1
    }
    if chains.keys() != ROWS.keys() or not all(all(chain.values()) for chain in chains.values()):
        return Finding(claim, "chains were not counted for all rows", NOT_MEASURABLE)
    wrong = [label for label, chain in chains.items() if len(set(chain.values())) > 1 and label != RECURRENT]
    recurrent = chains.pop(RECURRENT)
    if not proportional(list(recurrent.values()), list(recurrent)):
        wrong.append(RECURRENT)
    longest = max(recurrent)
    others = sorted({length for chain in chains.values() for length in chain.values()})
    measured = (
        f"the longest chain of dependent matrix products of {longest} tokens is {recurrent[longest]} long in "
        f"a recurrent layer, {' or '.join(map(str, others[-2:]))} in the others"
    )
    return Finding(claim, measured, f"{FAILS}: {', '.join(wrong)}" if wrong else HOLDS)


def paths(records: Sequence[Record]) -> Finding:
    """The measured path lengths follow the printed orders."""
    claim = (
        "The longest path is O(1) in self-attention, O(n) in a recurrent layer, O(log_k n) in dilated and "
        "O(n/k) in contiguous convolutions, O(n/r) in restricted self-attention (Table 1 and section 4)"
    )
    found = {label: along(cells(records, label, PATH), 0) for label in ROWS}
    if not all(found.values()):
        return Finding(claim, "paths were not measured for all rows", NOT_MEASURABLE)
    wrong = [
        f"{label} ({record.path_length} hops at {n} tokens, not {expected})"
        for label, line in found.items()
        for n, record in line.items()
        if record.path_length != (expected := ROWS[label].theory(n, 1, **ROWS[label].options).path_length)
    ]
    longest = max(found[SELF_ATTENTION])
    hops = ", ".join(
        f"{line[longest].path_length} {label}" for label, line in found.items() if longest in line
    )
    measured = f"hops until the last of {longest} tokens depends on the first: {hops}"
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


def time_growths(records: Sequence[Record], label: str) -> list[Growth | None]:
    """How the time of a row grows with tokens and with width."""
    found = cells(records, label, TIME)
    return [
        _growth({place: call_time(record).median for place, record in along(found, axis).items()})
        for axis in (0, 1)
    ]


def multiples(records: Sequence[Record], label: str) -> str:
    """Operations per unit of the printed order: `4`, or `3.9 to 4`."""
    counted = cells(records, label, OPERATIONS)
    shares = [(record.flops or 0) / ROWS[label].order(*place) for place, record in counted.items()]
    return " to ".join(dict.fromkeys(f"{edge:.3g}" for edge in (min(shares), max(shares)))) if shares else "–"


def grows(fits: Sequence[Growth | None], between: str) -> str:
    """`n^1.98 (1.95 to 2.01) and d to an unclear power`."""
    return between.join(_grows(fit, name) for fit, name in zip(fits, _AXES, strict=True))


def _grows(fit: Growth | None, name: str) -> str:
    if fit is None or not fit.clear:
        return f"{name} to an unclear power"
    return show_growth(fit).replace("n^", f"{name}^")


def _growth(line: dict[int, float]) -> Growth | None:
    return growth(list(line), list(line.values()))
