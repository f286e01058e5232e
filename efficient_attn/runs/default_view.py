"""Default views: one table of all quantities, and flat rows."""

from collections.abc import Sequence
from typing import Any

from efficient_attn.measure.record import Record
from efficient_attn.report.table import NOT_MEASURED, Table
from efficient_attn.report.text import failure_notes
from efficient_attn.runs.study import Run, Settled
from efficient_attn.stats.estimates import call_time, middle, on_device


def flat_row(record: Record) -> dict[str, Any]:
    """Flat row with options in columns and medians of times and draws.

    Models and kernel entries have the mean over draws alone, `NAME_mean`, as in their tables.
    """
    fields = type(record).fields().items()
    lists = {"options"} | {name for name, field in fields if field.type.endswith("numbers")}
    row = {name: value for name, value in record.row().items() if name not in lists}
    row |= {f"option_{name}": value for name, value in record.case.options.items()}
    if record.times_s:
        median, low, high, samples = call_time(record)
        row |= {"time_s": median, "time_low_s": low, "time_high_s": high, "samples": samples}
        ordered = sorted(record.times_s)
        row |= {f"time_p{share}_s": ordered[round(share / 100 * (samples - 1))] for share in (20, 50, 80)}
        if record.case.kind == "time" and median:
            row["tokens_per_s"] = record.case.batch * record.case.tokens / median
    for name in [name for name in row if record.measured.get(f"{name}_draws")]:
        row[f"{name}_mean"] = row.pop(name)
        if record.case.of not in ("kernel", "model"):
            draws = record.measured[f"{name}_draws"]
            row[name], row[f"{name}_low"], row[f"{name}_high"], _ = middle(draws)
    if record.device_times_s:
        row["device_time_s"] = call_time(on_device(record)).median
    return row


def samples(record: Record) -> list[dict[str, Any]]:
    """Numbered rows of the raw samples, or one empty row."""
    lists = {name: x for name, x in record.row().items() if isinstance(x, (list, tuple)) and x}
    count = max(map(len, lists.values()), default=0)
    rows = [{name: x[n] for name, x in lists.items() if n < len(x)} for n in range(count)]
    return [{"sample": n, **row} for n, row in enumerate(rows)] or [{}]


def tables(records: Sequence[Record], run: Run[Settled]) -> list[Table]:
    """One row per record, one column per quantity that was measured."""
    measured = [record for record in records if record.status == "ok"]
    fields = {field for record in measured for field in record.measured}
    declared = type(records[0]).quantities().values() if records else ()
    shown = [quantity for quantity in declared if quantity.compared and quantity.field in fields]
    rows = []
    for record in measured:
        row = {**record.measured, **flat_row(record)}
        values = (_cell(row.get(quantity.field)) for quantity in shown)
        rows.append((record.case.label, str(record.case.tokens), *values))
    heads = (f"{quantity.name}, {quantity.unit}".removesuffix(", ") for quantity in shown)
    return [Table("Records", ("backend", "tokens", *heads), tuple(rows), failure_notes(records))]


def _cell(value: Any) -> str:
    if value is None:
        return NOT_MEASURED
    return f"{value:.4g}" if isinstance(value, (int, float)) else ", ".join(f"{entry:.4g}" for entry in value)
