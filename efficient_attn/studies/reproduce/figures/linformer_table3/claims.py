"""Table 3 of Wang et al. 2020 (Linformer) as data, the same ratios of records, and its claims."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from efficient_attn.report.table import show_growth
from efficient_attn.runner.records import Case, Record
from efficient_attn.stats.growth import growth
from efficient_attn.stats.rounds import call_time
from efficient_attn.stats.verdicts import (
    FAILS,
    HOLDS,
    NOT_MEASURABLE,
    Finding,
    against_both,
    agrees,
    cost,
    costs_less,
    of_all,
    span,
)

RANKS = (128, 256, 512, 1024, 2048)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)

DENSE, FUSED, LINFORMER = "exact-dense", "exact", "linformer"

_TIME_SAVED = (
    (1.5, 1.3),
    (1.7, 1.6, 1.3),
    (2.6, 2.4, 2.1, 1.3),
    (3.4, 3.2, 2.8, 2.2, 1.3),
    (5.5, 5.0, 4.4, 3.5, 2.1),
    (8.6, 7.8, 7.0, 5.6, 3.3),
    (13, 12, 11, 8.8, 5.0),
    (20, 18, 16, 14, 7.9),
)
_MEMORY_SAVED = (
    (1.7, 1.5),
    (3.0, 2.9, 1.8),
    (6.1, 5.6, 3.6, 2.0),
    (14, 13, 8.3, 4.3, 2.3),
    (28, 26, 17, 8.5, 4.5),
    (56, 48, 32, 16, 8),
    (56, 48, 36, 18, 16),
    (60, 52, 40, 20, 18),
)

# (tokens, rank) to how many times less is taken.
Ratios = Mapping[tuple[int, int], float]


def _as_ratios(rows: Sequence[Sequence[float]]) -> Ratios:
    return {
        (tokens, rank): ratio
        for tokens, row in zip(LENGTHS, rows, strict=True)
        for rank, ratio in zip(RANKS, row, strict=False)
    }


class Saved(NamedTuple):
    """One half of the table.

    Attributes:
        kind: Kind of its records.
        unit: Saved resource, in words.
        paper: Value printed in the paper.
    """

    kind: str
    unit: str
    paper: Ratios


TIME = Saved("time", "time", _as_ratios(_TIME_SAVED))
MEMORY = Saved("memory", "memory", _as_ratios(_MEMORY_SAVED))


def pairs(
    records: Sequence[Record], saved: Saved, baseline: str
) -> dict[tuple[int, int], tuple[Record, Record]]:
    """Linformer's record and the baseline's at every length and rank that both were measured at."""
    found = {
        (record.case.backend, record.case.tokens, rank(record.case)): record
        for record in records
        if record.status == "ok" and record.case.kind == saved.kind
    }
    return {
        (tokens, size): (found[LINFORMER, tokens, size], found[baseline, tokens, 0])
        for backend, tokens, size in sorted(found)
        if backend == LINFORMER and (baseline, tokens, 0) in found
    }


def measured(records: Sequence[Record], saved: Saved, baseline: str) -> Ratios:
    """Cost of the baseline divided by the cost of Linformer."""
    return {place: cost(its) / cost(own) for place, (own, its) in pairs(records, saved, baseline).items()}


def rank(case: Case) -> int:
    """The rank of a Linformer; 0 for softmax attention."""
    return int(case.options.get("rank", 0))


# Two medians or peaks that differ by less than this share are as good as equal.
_EQUAL = 0.05


def findings(records: Sequence[Record]) -> list[Finding]:
    """A verdict on every claim."""
    return [
        saves(records, TIME),
        saves(records, MEMORY),
        saves_more_and_more(records, TIME),
        saves_more_and_more(records, MEMORY),
        *(at_the_end(records, saved) for saved in (TIME, MEMORY)),
        linear(records),
    ]


def saves(records: Sequence[Record], saved: Saved) -> Finding:
    """Linformer takes less than softmax written out, and than the fused kernel, wherever it was measured."""
    claim = f"Linformer saves {saved.unit} at every length and rank of the table (Table 3)"
    ratios = {baseline: measured(records, saved, baseline) for baseline in (DENSE, FUSED)}
    text = "; ".join(_told(its, baseline) for baseline, its in ratios.items() if its)
    answers = (
        {_place(place): costs_less(*pair) for place, pair in pairs(records, saved, baseline).items()}
        for baseline in ratios
    )
    return Finding(claim, text or "no length was measured with a baseline", against_both(*answers))


def saves_more_and_more(records: Sequence[Record], saved: Saved) -> Finding:
    """At one rank the ratio falls from no length to the next, and is larger at the last than at the first."""
    claim = f"The longer the sequence, the more {saved.unit} is saved at one rank (Table 3)"
    lines = {baseline: _lines(measured(records, saved, baseline)) for baseline in (DENSE, FUSED)}
    text = "; ".join(f"{baseline} {_ends(its)}" for baseline, its in lines.items() if its)
    answers = ({f"rank {size}": _rises(line) for size, line in its.items()} for its in lines.values())
    return Finding(claim, text or "no rank was measured at two lengths", against_both(*answers))


def at_the_end(records: Sequence[Record], saved: Saved) -> Finding:
    """The largest number of the table, where it could be measured."""
    place = (LENGTHS[-1], RANKS[0])
    claim = (
        f"{saved.paper[place]:g} times less {saved.unit} at {place[0]} tokens and rank {place[1]} (Table 3)"
    )
    ratio = measured(records, saved, DENSE).get(place)
    if ratio is not None:
        return Finding(claim, f"{ratio:.3g} times", HOLDS if ratio >= saved.paper[place] else FAILS)
    dense = measured(records, saved, DENSE)
    if not dense:
        return Finding(claim, "no length was measured with a baseline", NOT_MEASURABLE)
    longest = max(dense, key=lambda one: (one[0], -one[1]))
    printed = saved.paper.get(longest)
    text = f"measured up to {longest[0]} tokens: {dense[longest]:.3g} times at rank {longest[1]}" + (
        f", {printed:g} in the paper" if printed is not None else ""
    )
    return Finding(claim, text, NOT_MEASURABLE)


def linear(records: Sequence[Record]) -> Finding:
    """The time of one sequence grows with the first power of its tokens."""
    claim = "The time of a Linformer grows linearly with the length at one rank (section 4, figure 2)"
    fits = {}
    for size in RANKS:
        times = {
            record.case.tokens: call_time(record).median / record.case.batch
            for record in records
            if record.times_s and record.case.backend == LINFORMER and rank(record.case) == size
        }
        if len(times) > 3:
            fits[size] = growth(sorted(times), [times[tokens] for tokens in sorted(times)])
    told = {f"rank {size}": agrees(1, fit) for size, fit in fits.items()}
    if not fits:
        return Finding(claim, "too few lengths of one rank", NOT_MEASURABLE)
    text = "time of a sequence " + ", ".join(
        f"{show_growth(fit)} at rank {size}" for size, fit in fits.items()
    )
    return Finding(claim, text, of_all(told))


def _told(ratios: Ratios, baseline: str) -> str:
    return f"{baseline} takes {span(list(ratios.values()))} times as much"


def _lines(ratios: Ratios) -> dict[int, list[tuple[int, float]]]:
    """(tokens, ratio) in ascending order for every rank with two lengths or more."""
    lines = {
        size: sorted((tokens, ratio) for (tokens, own), ratio in ratios.items() if own == size)
        for size in RANKS
    }
    return {size: line for size, line in lines.items() if len(line) > 1}


def _rises(line: Sequence[tuple[int, float]]) -> bool:
    """Whether no ratio is clearly below the one before, and the last clearly above the first."""
    kept = all(ratio >= before * (1 - _EQUAL) for (_, before), (_, ratio) in pairwise(line))
    return kept and line[-1][1] > line[0][1] * (1 + _EQUAL)


def _ends(lines: Mapping[int, Sequence[tuple[int, float]]]) -> str:
    """The first and the last ratio of the smallest rank."""
    size, line = next(iter(lines.items()))
    (first, before), (last, after) = line[0], line[-1]
    return f"takes {before:.2g} times as much at {first} tokens, {after:.2g} times at {last}, rank {size}"


def _place(place: tuple[int, int]) -> str:
    return f"n = {place[0]}, rank {place[1]}"
