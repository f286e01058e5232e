"""More heads at equal model_dim: what they cost, as a sentence and as a table."""

from collections.abc import Sequence

from efficient_attn.analysis.curves import by_subject, curves
from efficient_attn.analysis.heads import Heads, by_heads
from efficient_attn.report.table import Table, three_digits
from efficient_attn.sweep.records import Record

_MILLISECOND = 1e-3


def head_sentences(records: Sequence[Record]) -> list[str]:
    """How many times as long a call takes with the most heads as with the fewest."""
    return [
        f"{'At' if subject == 'attention' else f'Of the {subject}: at'} {tokens} tokens and equal model_dim "
        f"({model_dim}) {counts[-1]} heads take, against {counts[0]}, {_ratios(group)} as long."
        for subject, model_dim, tokens, counts, group in _groups(records)
    ]


def head_tables(records: Sequence[Record]) -> list[Table]:
    """One table for each subject and model_dim: backends as rows, numbers of heads as columns."""
    return [
        Table(
            f"Time per call{'' if subject == 'attention' else f' of the {subject}'} at {tokens} tokens and "
            f"model_dim {model_dim}, ms",
            ("backend", *(f"{count} heads of {model_dim // count}" for count in counts), "last / first"),
            tuple(
                (
                    one.label,
                    *(three_digits((point.value or 0.0) / _MILLISECOND) for point in one.points),
                    three_digits(one.ratio),
                )
                for one in group
            ),
        )
        for subject, model_dim, tokens, counts, group in _groups(records)
    ]


def _groups(records: Sequence[Record]) -> list[tuple[str, int, int, tuple[int, ...], list[Heads]]]:
    """What is told together: the same subject, model_dim, length and numbers of heads."""
    found: dict[tuple[str, int, int, tuple[int, ...]], list[Heads]] = {}
    for subject, group in by_subject(records).items():
        for one in by_heads(curves(group, "time_s")):
            found.setdefault((subject, one.model_dim, one.tokens, one.counts), []).append(one)
    return [(*key, group) for key, group in found.items()]


def _ratios(group: Sequence[Heads]) -> str:
    """`1.05 times (exact), 2.1 times (performer-positive)`, in rising order."""
    ordered = sorted(group, key=lambda one: one.ratio)
    return ", ".join(f"{three_digits(one.ratio)} times ({one.label})" for one in ordered)
