"""Where errors come from, as tables: one for each input."""

from collections.abc import Sequence

from efficient_attn.report.error_table import describe, show_error
from efficient_attn.report.table import Table
from efficient_attn.sweep.records import Record


def part_tables(records: Sequence[Record]) -> list[Table]:
    """Bias, spread over draws and rounding of every backend and size for which they were measured."""
    groups: dict[tuple[str, int, int], list[Record]] = {}
    for record in {record.case.key: record for record in records}.values():
        if record.output_bias is not None:
            groups.setdefault((record.case.inputs, record.case.tokens, record.case.seed), []).append(record)
    return [
        Table(
            f"Where the relative output error comes from: {describe(inputs)}; {tokens} tokens, seed {seed}",
            ("backend", "error", "bias", "spread over draws", "rounding"),
            tuple(_row(record) for record in group),
            (
                "Error: mean over draws. The squares of bias and spread add up to its mean square; bias is "
                "what more draws would not average away. Rounding: the same draws in float64.",
            ),
        )
        for (inputs, tokens, seed), group in groups.items()
    ]


def _row(record: Record) -> tuple[str, ...]:
    values = (
        record.output_relative_error,
        record.output_bias,
        record.output_spread,
        record.output_rounding,
    )
    return (record.case.label, *("" if value is None else show_error(value) for value in values))
