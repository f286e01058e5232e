"""Deviations of outputs from uniform attention: a table of one input."""

import json
from collections.abc import Iterable

from efficient_attn.measure.record import Record
from efficient_attn.report.table import NOT_MEASURED, Table
from efficient_attn.report.text import describe, show_error
from efficient_attn.stats.estimates import bland, middle

_QUANTITIES = ("output_correlation", "output_deviation_ratio", "output_rescaled_error")
_COLUMNS = ("backend", "error", "correlation c", "ratio ρ", "error, rescaled", "c of heads", "")
CORRELATION_NOTE = (
    "Correlation c: cosine of the deviations of output and exact output from uniform attention, which no "
    "rescaling changes. Bland: too close to uniform attention, a deviation below 0.9 of its best size."
)


def deviation_table(records: Iterable[Record], quantity: str) -> list[Table]:
    """Error, correlation c, deviation ratio ρ and rescaled error, if a record has them.

    Args:
        quantity: Field of the error.
    """
    rows, measured = [], [record for record in records if record.output_correlation is not None]
    for record in measured:
        draws = [record.measured.get(f"{name}_draws") for name in (quantity, *_QUANTITIES)]
        cells = [show_error(middle(values)[0]) if values else NOT_MEASURED for values in draws]
        rows.append((record.case.label, *cells, _spread(record), "bland" if bland(record) else ""))
    if not rows:
        return []
    case = measured[0].case
    title = f"Deviation from uniform attention: {describe(case.inputs)}; {case.tokens} tokens"
    note = f"{CORRELATION_NOTE} ρ: ratio of their norms, best at c; rescaled: the error at ρ = c."
    return [Table(title, _COLUMNS, tuple(rows), (note,), detail=True)]


def _spread(record: Record) -> str:
    """Range of the correlations of heads; a damaged text of a file has none."""
    try:
        heads = [float(c) for _, c, *_ in json.loads(record.output_by_head or "[]") if c is not None]
    except (ValueError, TypeError, RecursionError):
        heads = []
    return f"{min(heads):.2f} to {max(heads):.2f}" if heads else NOT_MEASURED
