"""Speed-ups over exact attention."""

from collections.abc import Sequence
from typing import NamedTuple

from efficient_attn.runner.records import Record
from efficient_attn.stats.curves import YARDSTICK, Curve, partner
from efficient_attn.stats.rounds import Typical, time_ratio


class Gain(NamedTuple):
    """Comparison of a backend with the baseline.

    Attributes:
        tokens: Longest length at which both were measured.
        ratio: Speed-up at that length, with an interval: above 1 the backend is faster.
        records: Times of the backend and of the baseline at that length.
    """

    label: str
    tokens: int
    ratio: Typical
    records: tuple[Record, Record]


def gains(all_curves: Sequence[Curve]) -> list[Gain]:
    """Every backend against the baseline of its setting, at the longest common length."""
    found = []
    for curve in all_curves:
        exact = partner(curve, all_curves, YARDSTICK)
        if exact is None or exact is curve:
            continue
        common = [(own, its) for own in curve.measured if (its := exact.at(own.tokens)) is not None]
        if common:
            own, its = common[-1]
            times = own.record, its.record
            found.append(Gain(curve.label, own.tokens, time_ratio(*times), times))
    return found
