"""Achieved share of the machine's peak matmul rate."""

from collections.abc import Iterable

from efficient_attn.runner.records import Record
from efficient_attn.stats.rounds import call_time


def rate_share(record: Record) -> float | None:
    """Operations per second of the median call, as a share of the machine's peak matmul rate.

    Only the counted operations enter: further computation lowers the share. None if the operations, the rate
    or the time is unknown.
    """
    if not (record.status == "ok" and record.flops and record.times_s and record.matmul_flops_per_s):
        return None
    return record.flops / call_time(record).median / record.matmul_flops_per_s


def rate_shares(records: Iterable[Record]) -> dict[str, float]:
    """Shares by case, for all plausible rates.

    No call is faster than the machine: if one exceeds the measured rate, other load disturbed the measurement
    of the rate, and every share of it would be too large.
    """
    records = list(records)
    too_low = {record.matmul_flops_per_s for record in exceeding(records)}
    known = {
        record.case.key: rate_share(record) for record in records if record.matmul_flops_per_s not in too_low
    }
    return {key: share for key, share in known.items() if share is not None}


def exceeding(records: Iterable[Record]) -> list[Record]:
    """Records with calls faster than the measured rate of the machine."""
    return [record for record in records if (rate_share(record) or 0.0) > 1]
