"""Time and memory of one backend at one length, and speed-ups over exact attention."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from efficient_attn.runner.records import Record
from efficient_attn.stats.curves import YARDSTICK, Curve, curves, partner
from efficient_attn.stats.rounds import Typical, time_ratio
from efficient_attn.studies.view import Environment

_QUANTITIES = ("time_s", "peak_bytes", "parameter_bytes", "state_bytes")
_COLUMNS = (
    "label",
    "tokens",
    "status",
    "time_s",
    "time_low_s",
    "time_high_s",
    "samples",
    "flops",
    "peak_bytes",
    "parameter_bytes",
    "state_bytes",
    "reason",
)


class Gain(NamedTuple):
    """Comparison of a backend with the baseline.

    Attributes:
        tokens: Longest length at which both were measured.
        ratio: Speed-up at that length, with an interval: above 1 the backend is faster.
    """

    label: str
    tokens: int
    ratio: Typical


def rows(records: Sequence[Record], environment: Environment | None = None) -> list[dict[str, Any]]:
    """One flat row per backend and length: medians with intervals, bytes, and reasons for missing values."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for quantity in _QUANTITIES:
        for curve in curves(records, quantity):
            for point in curve.points:
                named = {"label": curve.label, "tokens": point.tokens}
                row = found.setdefault((curve.label, point.tokens), named)
                row[quantity] = point.value
                if quantity == "time_s":
                    row["time_low_s"], row["time_high_s"] = point.low, point.high
                    row["samples"] = len(point.record.times_s or ())
                    row["flops"] = point.record.flops
                if point.record.status != "ok":
                    row["status"], row["reason"] = point.record.status, point.record.reason
    return [{**dict.fromkeys(_COLUMNS), "status": "ok", **row} for row in found.values()]


def gains(all_curves: Sequence[Curve]) -> list[Gain]:
    """Every backend against the baseline of its setting, at the longest common length."""
    compared = (
        gain_over(curve, exact)
        for curve in all_curves
        if (exact := partner(curve, all_curves, YARDSTICK)) is not None and curve is not exact
    )
    return [gain for gain in compared if gain is not None]


def gain_over(curve: Curve, exact: Curve) -> Gain | None:
    """One backend against another; None without a common length."""
    common = [(own, its) for own in curve.measured if (its := exact.at(own.tokens)) is not None]
    if not common:
        return None
    own, its = common[-1]
    return Gain(curve.label, own.tokens, time_ratio(own.record, its.record))
