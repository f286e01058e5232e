"""Where errors come from, as tables: one for each input."""

from collections.abc import Sequence

from efficient_attn.report.error_table import describe, show_error
from efficient_attn.report.table import Table
from efficient_attn.runner.record import Record
from efficient_attn.runner.sizes import sized


def part_tables(records: Sequence[Record]) -> list[Table]:
    """Bias, spread over draws and rounding of every backend and size for which they were measured."""
    groups: dict[tuple[str, int, int], list[Record]] = {}
    for record in {record.case.key: record for record in records}.values():
        if record.output_bias is not None:
            groups.setdefault((record.case.inputs, record.case.tokens, record.case.seed), []).append(record)
    return [
        Table(
            f"Where the relative output error comes from: {describe(inputs)}; {tokens} tokens, seed {seed}",
            (
                "backend",
                "error",
                "bias",
                "spread over draws",
                "rounding",
                "weights over exact sums",
                "weights over own sums",
            ),
            tuple(_row(record) for record in _by_series(group)),
            (
                "Error: mean over draws. The squares of bias and spread add up to its mean square; bias is "
                "what more draws would not average away. Rounding: the same draws in float64.",
                "Weights: relative error of the estimated kernel, divided by the exact sum of each row and "
                "by the estimated one, as attention does; root mean squares over the same draws.",
            ),
        )
        for (inputs, tokens, seed), group in groups.items()
    ]


def _by_series(records: Sequence[Record]) -> list[Record]:
    """Records of one backend together, by rising size."""
    order = list(dict.fromkeys(sized(record.case).series for record in records))
    return sorted(records, key=lambda record: order.index(sized(record.case).series))


def _row(record: Record) -> tuple[str, ...]:
    values = (
        record.output_relative_error,
        record.output_bias,
        record.output_spread,
        record.output_rounding,
        record.weights_error_exact_sums,
        record.weights_error_own_sums,
    )
    return (record.case.label, *("" if value is None else show_error(value) for value in values))


def part_sentence(records: Sequence[Record]) -> str | None:
    """What dividing by estimated sums does to the weights."""
    ratios = [
        record.weights_error_own_sums / record.weights_error_exact_sums
        for record in {record.case.key: record for record in records}.values()
        if record.weights_error_own_sums is not None and record.weights_error_exact_sums
    ]
    if not ratios:
        return None
    lower = sum(ratio < 1 for ratio in ratios)
    return (
        f"Dividing by estimated sums instead of exact ones lowers the error of the weights in {lower} of "
        f"{len(ratios)} cases (to {show_error(min(ratios))} to {show_error(max(ratios))} times, same draws)."
    )
