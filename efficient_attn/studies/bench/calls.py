"""Table of the calls at the longest length: percentiles, throughput, and percentages of measured peaks."""

from collections.abc import Iterable, Sequence

from efficient_attn.measure.record import Record
from efficient_attn.report.table import Table
from efficient_attn.report.text import three_digits
from efficient_attn.stats.curves import Curve
from efficient_attn.stats.estimates import per_second, percentiles, tokens_per_s

# Heads of the percentages: the fields of the amount and of the measured rate, and the unit of 10⁹ of it.
_SHARES = {
    "% of peak GEMM": ("flops", "matmul_flops_per_s", "GFLOP/s of a large matrix product (GEMM)"),
    "% of peak copy": ("moved_bytes", "copy_bytes_per_s", "GB/s of a large copy"),
}
_COUNTED = "Operations exclude masked entries; inputs, output and parameters are moved once."


def call_table(title: str, times: Sequence[Curve]) -> Table:
    """One row per curve with a time, at its longest length."""
    ends = [(curve.label, curve.measured[-1].record) for curve in times if curve.measured]
    shares = {head: [_share(record, *fields[:2]) for _, record in ends] for head, fields in _SHARES.items()}
    shares = {head: cells for head, cells in shares.items() if any(cells)}
    rows = tuple(
        (
            label,
            str(record.case.tokens),
            *(three_digits(time_s * 1e3) for time_s in percentiles(record).values()),
            _throughput(record),
            *(cells[row] for cells in shares.values()),
        )
        for row, (label, record) in enumerate(ends)
    )
    columns = ("backend", "tokens", "p20, ms", "p50, ms", "p80, ms", "tokens/s", *shares)
    return Table(title, columns, rows, _notes([record for _, record in ends], shares))


def _throughput(record: Record) -> str:
    rate = tokens_per_s(record)
    return "" if rate is None else three_digits(rate)


def _share(record: Record, amount: str, ceiling: str) -> str:
    """Achieved percentage of a measured rate; empty if unknown."""
    done, most = getattr(record, amount), getattr(record, ceiling)
    rate = per_second(done, record) if done and most else None
    return "" if rate is None else three_digits(100 * rate / most)


def _notes(records: Sequence[Record], heads: Iterable[str]) -> tuple[str, ...]:
    """The measured rates behind the percentages."""
    rates = []
    for head in heads:
        _, field, unit = _SHARES[head]
        most = max(getattr(record, field) or 0.0 for record in records)
        rates.append(f"{three_digits(most / 1e9)} {unit}")
    if not rates:
        return ()
    return (f"Peaks measured in this run: {', '.join(rates)}. {_COUNTED}",)
