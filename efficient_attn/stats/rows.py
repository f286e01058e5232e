"""Records as flat rows of a data frame."""

from typing import Any

from efficient_attn.runner.quantity import FIELDS, QUANTITIES, samples
from efficient_attn.runner.record import Record
from efficient_attn.stats.rounds import call_time


def flat_row(record: Record) -> dict[str, Any]:
    """One flat row: options in columns, times by their median, curves by their last entry, no raw lists."""
    row = _flat(record)
    if record.times_s:
        times = call_time(record)
        row |= {
            "time_s": times.median,
            "time_low_s": times.low,
            "time_high_s": times.high,
            "samples": times.samples,
        }
    return row


def sample_rows(record: Record) -> list[dict[str, Any]]:
    """One row per sample; a record without samples is one row."""
    lists = {one: values for name, one in samples().items() if (values := getattr(record, name)) is not None}
    row = {name: value for name, value in _flat(record).items() if name not in lists}
    count = max(map(len, lists.values()), default=0)
    entries = [
        {"sample": number, **{name: values[number] for name, values in lists.items() if number < len(values)}}
        for number in range(count)
    ]
    return [{**row, **entry} for entry in entries] or [row]


def _flat(record: Record) -> dict[str, Any]:
    lists = {name for name, field in FIELDS.items() if field.type in ("numbers", "whole numbers")}
    row = {name: value for name, value in record.row().items() if name not in lists | {"options"}}
    last = (one for one in QUANTITIES.values() if one.entry == "last" and getattr(record, one.field))
    row |= {one.field: getattr(record, one.field)[-1] for one in last}
    return row | {f"option_{name}": value for name, value in record.case.options.items()}
