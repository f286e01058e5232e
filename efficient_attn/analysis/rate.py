"""How much of what the machine can do in matrix products a backend reaches."""

from efficient_attn.analysis.statistics import middle
from efficient_attn.sweep.records import Record


def rate_share(record: Record) -> float | None:
    """Operations per second of the median call over those of the machine's matrix products.

    The operations are the counted ones: what is computed beyond them lowers the share. None where the
    operations, the rate or the time is unknown.
    """
    if not (record.status == "ok" and record.flops and record.times_s and record.matmul_flops_per_s):
        return None
    return record.flops / middle(record.times_s).median / record.matmul_flops_per_s
