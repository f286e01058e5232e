"""Records as flat rows of a data frame."""

from typing import Any

from efficient_attn.analysis.rounds import call_time
from efficient_attn.sweep.case import Record

# Raw lists of a record and what one of their entries is called.
SAMPLES = {
    "times_s": "time_s",
    "output_mse_draws": "output_mse",
    "output_relative_error_draws": "output_relative_error",
    "weights_relative_error_draws": "weights_relative_error",
    "weights_row_kl_draws": "weights_row_kl",
    "kernel_mse_draws": "kernel_mse",
    "hidden_relative_error_draws": "hidden_relative_error",
    "mean_pool_distance_draws": "mean_pool_distance",
    "first_token_distance_draws": "first_token_distance",
    "next_token_kl_draws": "next_token_kl",
    "next_token_disagreement_draws": "next_token_disagreement",
    "perplexity_draws": "perplexity",
}

# What else is no single value.
_LISTS = (
    "turn_sizes",
    "output_relative_error_heads",
    "train_steps",
    "train_seconds_s",
    "train_bits_per_byte",
    "held_out_bits_per_byte",
    "held_out_bits_per_byte_windows",
    "hidden_relative_error_layers",
)


def flat_row(record: Record, rate_share: float | None = None) -> dict[str, Any]:
    """One flat row: options as columns of their own, times by their median, raw lists left out."""
    row = _flat(record)
    if record.times_s:
        times = call_time(record)
        row |= {
            "time_s": times.median,
            "time_low_s": times.low,
            "time_high_s": times.high,
            "samples": times.samples,
            "rate_share": rate_share,
        }
    return row


def sample_rows(record: Record) -> list[dict[str, Any]]:
    """One row per sample; a record without samples is one row."""
    lists = {one: values for name, one in SAMPLES.items() if (values := getattr(record, name)) is not None}
    row = {name: value for name, value in _flat(record).items() if name not in lists}
    count = max(map(len, lists.values()), default=0)
    samples = [
        {"sample": number, **{name: values[number] for name, values in lists.items() if number < len(values)}}
        for number in range(count)
    ]
    return [{**row, **sample} for sample in samples] or [row]


def _flat(record: Record) -> dict[str, Any]:
    row = {name: value for name, value in record.row().items() if name not in (*SAMPLES, *_LISTS, "options")}
    return row | {f"option_{name}": value for name, value in record.case.options.items()}
