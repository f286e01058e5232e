"""Claims of Vaswani et al. 2017 in Table 1 and section 4, judged by records."""

from collections.abc import Mapping, Sequence

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
    turns_round,
)
from efficient_attn.studies.reproduce.figures.vaswani_table1.layers import (
    KERNEL,
    OPERATIONS,
    PATH,
    PROJECTED,
    RECURRENT,
    ROWS,
    SELF_ATTENTION,
    TIME,
    Cells,
    along,
    cells,
)

AXES = ("n", "d")


def findings(records: Sequence[Record]) -> list[Finding]:
    """A verdict on every claim, the rows of the table first."""
    return [
        *(cost(records, label) for label in ROWS if label != PROJECTED),
        waiting(records),
        paths(records),
        faster_than_recurrent(records),
        dearer_than_recurrent(records),
    ]


def cost(records: Sequence[Record], label: str) -> Finding:
    """Operations are a constant multiple of the printed order; time grows with the same powers."""
    row = ROWS[label]
    claim = f"A {label} layer costs O({row.printed}) (Table 1)"
    counted = cells(records, label, OPERATIONS)
    if not all(record.flops for record in counted.values()) or not counted:
        return Finding(claim, "no operations were counted", NOT_MEASURABLE)
    fits = time_growths(records, label)
    shown = " and ".join(grows(fit, name) for fit, name in zip(fits, AXES, strict=True))
    low, high = multiples(records, label)
    many = f"{low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} to {high:.3g}"
    measured = f"{many} operations for each {row.printed}; time grows with {shown}"
    if not proportional([record.flops or 0 for record in counted.values()], _orders(label, counted)):
        return Finding(claim, measured, FAILS)
    expected = [_power_of_operations(counted, axis) for axis in range(2)]
    agreeing = [agrees(power, fit) for power, fit in zip(expected, fits, strict=True)]
    differing = [
        f"{grows(fit, name)} and not {name}^{power:.3g}"
        for name, power, fit, same in zip(AXES, expected, fits, agreeing, strict=True)
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
        if record.path_length != (expected := ROWS[label].theory(n, 1).path_length)
    ]
    longest = max(next(iter(found.values())))
    hops = ", ".join(
        f"{line[longest].path_length} {label}" for label, line in found.items() if longest in line
    )
    measured = f"hops until the last of {longest} tokens depends on the first: {hops}"
    return Finding(claim, measured, f"{FAILS}: {', '.join(wrong)}" if wrong else HOLDS)


def faster_than_recurrent(records: Sequence[Record]) -> Finding:
    """Wherever there are fewer tokens than entries of one, attention takes less time."""
    claim = "Self-attention is faster than a recurrent layer where n is smaller than d (section 4)"
    times = {label: cells(records, label, TIME) for label in (SELF_ATTENTION, PROJECTED, RECURRENT)}
    both = sorted(times[SELF_ATTENTION].keys() & times[RECURRENT].keys())
    few, many = [(n, d) for n, d in both if n < d], [(n, d) for n, d in both if n >= d]
    if not few:
        return Finding(claim, "nothing was timed with n smaller than d", NOT_MEASURABLE)
    parts = [
        f"{_gains(times, SELF_ATTENTION, few)} times as fast where n < d",
        f"{_gains(times, PROJECTED, few)} times with its projections",
        f"{_gains(times, SELF_ATTENTION, many)} times where n ≥ d, up to n = {max(n for n, _ in both)}",
        _equal_operations(records),
    ]
    answers = {
        _place(place): costs_less(times[SELF_ATTENTION][place], times[RECURRENT][place]) for place in few
    }
    return Finding(claim, "; ".join(parts), of_all(answers))


def dearer_than_recurrent(records: Sequence[Record]) -> Finding:
    """A convolution does k times the operations of a recurrent layer."""
    claim = "A convolutional layer is more expensive than a recurrent one by a factor of k (section 4)"
    ours, others = (cells(records, label, OPERATIONS) for label in ("convolutional", RECURRENT))
    if not (both := ours.keys() & others.keys()):
        return Finding(claim, "no operations were counted", NOT_MEASURABLE)
    ratios = [(ours[place].flops or 0) / (others[place].flops or 1) for place in both]
    timed = {label: cells(records, label, TIME) for label in ("convolutional", RECURRENT)}
    shared = sorted(timed["convolutional"].keys() & timed[RECURRENT].keys())
    faster = [_ratio(timed[RECURRENT][place], timed["convolutional"][place]) for place in shared]
    measured = f"{span(ratios)} times the operations at k = {KERNEL}" + (
        f", in {span([1 / gain for gain in faster])} times the time" if faster else ""
    )
    if proportional(ratios, [KERNEL] * len(ratios)) and abs(ratios[0] / KERNEL - 1) < 0.01:
        return Finding(claim, measured, HOLDS)
    if max(ratios) < 1:
        return Finding(claim, measured, turns_round(f"the recurrent layer is an LSTM and k = {KERNEL}"))
    return Finding(claim, measured, FAILS)


def time_growths(records: Sequence[Record], label: str) -> list[Growth | None]:
    """How the time of a row grows with tokens and with width."""
    found = cells(records, label, TIME)
    return [
        growth(list(line), [call_time(record).median for record in line.values()])
        for line in (along(found, axis) for axis in range(2))
    ]


def multiples(records: Sequence[Record], label: str) -> tuple[float, float]:
    """Least and most operations per unit of the printed order."""
    counted = cells(records, label, OPERATIONS)
    orders = _orders(label, counted)
    shares = [(record.flops or 0) / order for record, order in zip(counted.values(), orders, strict=True)]
    return min(shares), max(shares)


def grows(fit: Growth | None, name: str) -> str:
    """`n^1.98 (1.95 to 2.01)`, the power of tokens or of width."""
    if fit is None or not fit.clear:
        return f"{name} to an unclear power"
    return show_growth(fit).replace("n^", f"{name}^")


def _orders(label: str, found: Cells) -> list[float]:
    return [ROWS[label].order(n, d) for n, d in found]


def _power_of_operations(counted: Cells, axis: int) -> float:
    """The power that operations grow with along an axis, found as that of times is."""
    line = along(counted, axis)
    fit = growth(list(line), [record.flops or 0 for record in line.values()])
    return 0.0 if fit is None else fit.power


def _ratio(record: Record, other: Record) -> float:
    return time_ratio(other, record).median


def _gains(times: Mapping[str, Cells], label: str, places: Sequence[tuple[int, int]]) -> str:
    """How many times a layer is faster than the recurrent one, from the least place to the most."""
    return span(
        [_ratio(times[RECURRENT][place], times[label][place]) for place in places if place in times[label]]
    )


def _equal_operations(records: Sequence[Record]) -> str:
    """Length of equal operations: attention grows with n², an LSTM with n."""
    ours, others = (cells(records, label, OPERATIONS) for label in (SELF_ATTENTION, RECURRENT))
    shares = [n * (others[n, d].flops or 0) / (ours[n, d].flops or 1) / d for n, d in ours.keys() & others]
    return f"both do as many operations at n = {span(shares)} d" if shares else "operations were not counted"


def _place(place: tuple[int, int]) -> str:
    return f"n = {place[0]}, d = {place[1]}"
