"""What Wang et al. 2020 claim of Linformer's time and memory, judged by records."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from efficient_attn.analysis.fits import growth
from efficient_attn.analysis.verdicts import (
    FAILS,
    HOLDS,
    NOT_MEASURABLE,
    ONLY_AGAINST_DENSE,
    Finding,
    agrees,
    turns_round,
)
from efficient_attn.experiments.reproduce._table3 import (
    DENSE,
    FUSED,
    LENGTHS,
    LINFORMER,
    MEMORY,
    RANKS,
    TIME,
    Ratios,
    Saved,
    measured,
    rank,
)
from efficient_attn.report.table import show_growth
from efficient_attn.sweep.records import Record

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
    """Every measured ratio is above 1, against softmax written out and against the fused kernel."""
    claim = f"Linformer saves {saved.unit} at every length and rank of the table (Table 3)"
    dense, fused = (measured(records, saved, baseline) for baseline in (DENSE, FUSED))
    told = [_told(ratios, baseline) for ratios, baseline in ((dense, DENSE), (fused, FUSED)) if ratios]
    if not told:
        return Finding(claim, "no length was measured with a baseline", NOT_MEASURABLE)
    text = "; ".join(told)
    lost_dense, lost_fused = ([place for place, ratio in r.items() if ratio <= 1] for r in (dense, fused))
    if len(lost_dense) == len(dense) and len(lost_fused) == len(fused):
        return Finding(claim, text, FAILS)
    if lost_dense:
        return Finding(claim, text, turns_round(_places(lost_dense)))
    if fused and len(lost_fused) == len(fused):
        return Finding(claim, text, ONLY_AGAINST_DENSE)
    if lost_fused:
        return Finding(
            claim, text, f"{ONLY_AGAINST_DENSE}: against fused softmax it {turns_round(_places(lost_fused))}"
        )
    return Finding(claim, text, HOLDS)


def saves_more_and_more(records: Sequence[Record], saved: Saved) -> Finding:
    """At one rank the ratio falls from no length to the next, and is larger at the last than at the first."""
    claim = f"The longer the sequence, the more {saved.unit} is saved at one rank (Table 3)"
    lines = {baseline: _lines(measured(records, saved, baseline)) for baseline in (DENSE, FUSED)}
    if not any(lines.values()):
        return Finding(claim, "no rank was measured at two lengths", NOT_MEASURABLE)
    text = "; ".join(f"{baseline} {_ends(its)}" for baseline, its in lines.items() if its)
    rising = {
        baseline: [size for size, line in its.items() if _rises(line)] for baseline, its in lines.items()
    }
    flat = {
        baseline: [f"{size}" for size in its if size not in rising[baseline]]
        for baseline, its in lines.items()
    }
    if not any(rising.values()):
        return Finding(claim, text, FAILS)
    if flat[DENSE]:
        return Finding(claim, text, turns_round(f"the rank is {', '.join(flat[DENSE])}"))
    if lines[FUSED] and not rising[FUSED]:
        return Finding(claim, text, ONLY_AGAINST_DENSE)
    if flat[FUSED]:
        when = turns_round(f"the rank is {', '.join(flat[FUSED])}")
        return Finding(claim, text, f"{ONLY_AGAINST_DENSE}: against fused softmax it {when}")
    return Finding(claim, text, HOLDS)


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
    text = (
        f"the longest length that fits is {longest[0]}: {dense[longest]:.3g} times at rank {longest[1]}"
        + (f", {printed:g} in the paper" if printed is not None else "")
    )
    return Finding(claim, text, NOT_MEASURABLE)


def linear(records: Sequence[Record]) -> Finding:
    """The time of one sequence grows with the first power of its tokens."""
    claim = "The time of a Linformer grows linearly with the length at one rank (section 4, figure 2)"
    fits = {}
    for size in RANKS:
        times = {
            record.case.tokens: min(record.times_s) / record.case.batch
            for record in records
            if record.times_s and record.case.backend == LINFORMER and rank(record.case) == size
        }
        if len(times) > 3:
            fits[size] = growth(sorted(times), [times[tokens] for tokens in sorted(times)])
    told = {size: agrees(1, fit) for size, fit in fits.items()}
    if not any(answer is not None for answer in told.values()):
        return Finding(claim, "too few lengths of one rank", NOT_MEASURABLE)
    text = "time of a sequence " + ", ".join(
        f"{show_growth(fit)} at rank {size}" for size, fit in fits.items()
    )
    wrong = [f"rank is {size}" for size, answer in told.items() if answer is False]
    if not wrong:
        return Finding(claim, text, HOLDS)
    return Finding(claim, text, turns_round(", ".join(wrong)) if True in told.values() else FAILS)


def _told(ratios: Ratios, baseline: str) -> str:
    return f"{baseline} takes {min(ratios.values()):.2g} to {max(ratios.values()):.2g} times as much"


def _lines(ratios: Ratios) -> dict[int, list[tuple[int, float]]]:
    """Of every rank with two lengths or more: (tokens, ratio), by rising length."""
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


def _places(places: Sequence[tuple[int, int]]) -> str:
    """`n = 512 (rank 128, 256), n = 1024 (rank 512)`."""
    lengths = sorted({tokens for tokens, _ in places})
    return ", ".join(
        f"n = {tokens} (rank {', '.join(str(size) for own, size in sorted(places) if own == tokens)})"
        for tokens in lengths
    )
