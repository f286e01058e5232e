"""Time and memory of one backend at one length, and speed-ups."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from efficient_attn.analysis.curves import YARDSTICK, Curve, curves, partner
from efficient_attn.analysis.rate import rate_shares
from efficient_attn.analysis.rounds import Typical, time_ratio
from efficient_attn.sweep.records import Record


class Gain(NamedTuple):
    """Comparison of a backend with the baseline.

    Attributes:
        pays_from: Shortest measured length from which on it is clearly faster at all measured lengths.
        tokens: Longest length at which both were measured.
        ratio: Speed-up at that length, with an interval: above 1 the backend is faster.
    """

    label: str
    pays_from: int | None
    tokens: int
    ratio: Typical


def summary(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One flat row per backend and length: medians with intervals, bytes, and reasons for missing values."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    shares = rate_shares(records)
    for quantity in ("time_s", "peak_bytes", "parameter_bytes", "state_bytes"):
        for curve in curves(records, quantity):
            for point in curve.points:
                named = {"label": curve.label, "tokens": point.tokens}
                row = rows.setdefault((curve.label, point.tokens), named)
                row[quantity] = point.value
                if quantity == "time_s":
                    row["time_low_s"], row["time_high_s"] = point.low, point.high
                    row["samples"] = len(point.record.times_s or ())
                    row["flops"], row["rate_share"] = point.record.flops, shares.get(point.record.case.key)
                if point.record.status != "ok":
                    row["status"], row["reason"] = point.record.status, point.record.reason
    return [{**dict.fromkeys(_COLUMNS), "status": "ok", **row} for row in rows.values()]


_COLUMNS = (
    "label",
    "tokens",
    "status",
    "time_s",
    "time_low_s",
    "time_high_s",
    "samples",
    "flops",
    "rate_share",
    "peak_bytes",
    "parameter_bytes",
    "state_bytes",
    "reason",
)


def yardstick(all_curves: Iterable[Curve]) -> Curve | None:
    """The curve of fused exact attention, if there is exactly one."""
    found = [curve for curve in all_curves if curve.backend == YARDSTICK]
    return found[0] if len(found) == 1 else None


def gains(all_curves: Sequence[Curve]) -> list[Gain]:
    """Every backend against the baseline of its setting, at the common lengths."""
    compared = (
        gain_over(curve, exact)
        for curve in all_curves
        if (exact := partner(curve, all_curves, YARDSTICK)) is not None and curve is not exact
    )
    return [gain for gain in compared if gain is not None]


def gain_over(curve: Curve, exact: Curve) -> Gain | None:
    """One backend against another; None without a common length."""
    pairs = [(own, its) for own in curve.measured if (its := exact.at(own.tokens)) is not None]
    if not pairs:
        return None
    ratios = [(own.tokens, time_ratio(own.record, its.record)) for own, its in pairs]
    pays_from = None
    for tokens, ratio in reversed(ratios):
        if ratio.side_of_one != 1:
            break
        pays_from = tokens
    return Gain(curve.label, pays_from, *ratios[-1])
