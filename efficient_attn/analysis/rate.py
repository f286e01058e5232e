"""How much of what the machine can do in matrix products a backend reaches."""

from collections.abc import Iterable

from efficient_attn.analysis.rounds import call_time
from efficient_attn.sweep.records import Record


def rate_share(record: Record) -> float | None:
    """Operations per second of the median call over those of the machine's matrix products.

    The operations are the counted ones: what is computed beyond them lowers the share. None where the
    operations, the rate or the time is unknown.
    """
    if not (record.status == "ok" and record.flops and record.times_s and record.matmul_flops_per_s):
        return None
    return record.flops / call_time(record).median / record.matmul_flops_per_s


def rate_shares(records: Iterable[Record]) -> dict[str, float]:
    """By case, the shares of all rates that can be true.

    No call is faster than the machine: where one exceeds the rate, something else held up the products by
    which the rate was measured, and every share of it would be too large.
    """
    records = list(records)
    too_low = {record.matmul_flops_per_s for record in exceeding(records)}
    known = {
        record.case.key: rate_share(record) for record in records if record.matmul_flops_per_s not in too_low
    }
    return {key: share for key, share in known.items() if share is not None}


def exceeding(records: Iterable[Record]) -> list[Record]:
    """The records whose calls are faster than the rate of the machine that was measured with them."""
    return [record for record in records if (rate_share(record) or 0.0) > 1]
