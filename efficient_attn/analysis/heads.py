"""Cost of the number of heads at constant model_dim = num_heads·head_dim.

The matrix products do not depend on the number of heads: tokens²·model_dim for exact attention, and
tokens·features·model_dim for linear attention, with the features counted per head. The number of exponentials
grows with it in both. The effect on time is measured.
"""

from collections.abc import Sequence
from typing import NamedTuple

from efficient_attn.analysis.curves import Curve, Point


class Heads(NamedTuple):
    """Costs of one backend at one length and model_dim, in rising order of heads."""

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
        """Ratio of the costs with the most and with the fewest heads."""
        return float((self.points[-1].value or 0.0) / (self.points[0].value or 1.0))


def by_heads(all_curves: Sequence[Curve]) -> list[Heads]:
    """All backends measured with several numbers of heads at equal model_dim, at the longest such length."""
    groups: dict[tuple[str, int, int, str], list[Point]] = {}
    for curve in all_curves:
        for point in curve.measured:
            case = point.record.case
            same = (case.of, case.layers, case.batch, case.causal, case.backward, case.dtype, case.device)
            others = str((*same, case.threads, case.inputs, case.seed))
            groups.setdefault((case.label, case.model_dim, case.tokens, others), []).append(point)
    longest: dict[tuple[str, int, str], Heads] = {}
    for (label, model_dim, tokens, others), points in groups.items():
        if len({point.record.case.num_heads for point in points}) < 2:
            continue
        key = (label, model_dim, others)
        if key not in longest or longest[key].tokens < tokens:
            ordered = sorted(points, key=lambda point: point.record.case.num_heads)
            longest[key] = Heads(label, model_dim, tokens, tuple(ordered))
    return list(longest.values())
