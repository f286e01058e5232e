"""Cost of the number of heads at constant model_dim = num_heads·head_dim.

The matrix products do not depend on the number of heads: tokens²·model_dim for exact attention, and
tokens·features·model_dim for linear attention, with the features counted per head. The number of exponentials
grows with it in both. The effect on time is measured.
"""

from collections.abc import Sequence
from typing import NamedTuple

from efficient_attn.report.table import Table, three_digits
from efficient_attn.runner.records import Record
from efficient_attn.stats.curves import Curve, Point, by_subject, curves

_MILLISECOND = 1e-3


class _Heads(NamedTuple):
    """Times of one backend at one length and model_dim, in rising order of heads."""

    label: str
    model_dim: int
    tokens: int
    points: tuple[Point, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of heads."""
        return tuple(point.record.case.num_heads for point in self.points)

    @property
    def ratio(self) -> float:
        """Ratio of the times with the most and with the fewest heads."""
        return float((self.points[-1].value or 0.0) / (self.points[0].value or 1.0))


def head_sentences(records: Sequence[Record]) -> list[str]:
    """The factor on the time of a call from the fewest to the most heads."""
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


def _groups(records: Sequence[Record]) -> list[tuple[str, int, int, tuple[int, ...], list[_Heads]]]:
    """Backends of one subject, model_dim, length and numbers of heads."""
    found: dict[tuple[str, int, int, tuple[int, ...]], list[_Heads]] = {}
    for subject, group in by_subject(records).items():
        for one in _by_heads(curves(group, "time_s")):
            found.setdefault((subject, one.model_dim, one.tokens, one.counts), []).append(one)
    return [(*key, group) for key, group in found.items()]


def _by_heads(all_curves: Sequence[Curve]) -> list[_Heads]:
    """All backends measured with several numbers of heads at equal model_dim, at the longest such length."""
    groups: dict[tuple[str, int, int, str], list[Point]] = {}
    for curve in all_curves:
        for point in curve.measured:
            case = point.record.case
            same = (case.of, case.layers, case.batch, case.causal, case.backward, case.dtype, case.device)
            others = str((*same, case.threads, case.inputs, case.seed))
            groups.setdefault((case.label, case.model_dim, case.tokens, others), []).append(point)
    longest: dict[tuple[str, int, str], _Heads] = {}
    for (label, model_dim, tokens, others), points in groups.items():
        if len({point.record.case.num_heads for point in points}) < 2:
            continue
        key = (label, model_dim, others)
        if key not in longest or longest[key].tokens < tokens:
            ordered = sorted(points, key=lambda point: point.record.case.num_heads)
            longest[key] = _Heads(label, model_dim, tokens, tuple(ordered))
    return list(longest.values())


def _ratios(group: Sequence[_Heads]) -> str:
    """`1.05 times (exact), 2.1 times (performer-positive)`, in rising order."""
    ordered = sorted(group, key=lambda one: one.ratio)
    return ", ".join(f"{three_digits(one.ratio)} times ({one.label})" for one in ordered)
