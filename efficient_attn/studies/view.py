"""How the records of a study are shown: functions of its folder, and defaults made from its quantities."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from efficient_attn.report.figures import Axis, Chart, Plot, Series
from efficient_attn.report.notes import failure_notes
from efficient_attn.report.palette import line_styles
from efficient_attn.report.table import Table
from efficient_attn.runner.quantity import Quantity
from efficient_attn.runner.record import Record
from efficient_attn.stats.rows import flat_row

Environment = Mapping[str, Any]
Plots = dict[str, Plot]


@dataclass(frozen=True, kw_only=True)
class View:
    """Functions of (records, environment) of one run.

    Attributes:
        tables: Tables of text.
        sentences: Findings, computed from the records.
        rows: Flat rows of the summary.
        plots: {name of the file: plot}, the most important first.
        files: {name of a further file of the run: its text}.
        claim: The records that belong to the study where no environment names it; None: records of its kinds.
    """

    tables: Callable[[Sequence[Record], Environment], list[Table]]
    sentences: Callable[[Sequence[Record], Environment], list[str]]
    rows: Callable[[Sequence[Record], Environment], list[dict[str, Any]]]
    plots: Callable[[Sequence[Record], Environment], Plots]
    files: Callable[[Sequence[Record], Environment], dict[str, str]]
    claim: Callable[[Sequence[Record]], list[Record]] | None = None

    @classmethod
    def of(cls, quantities: Sequence[Quantity], module: Any) -> "View":
        """The functions of a module, or of nothing, completed by the defaults."""

        def own(name: str, default: Callable[..., Any]) -> Callable[..., Any]:
            return getattr(module, name, default)

        return cls(
            tables=own("tables", partial(record_tables, quantities)),
            sentences=own("sentences", lambda records, environment: []),
            rows=own("rows", lambda records, environment: [flat_row(record) for record in records]),
            plots=own("plots", partial(_plots, quantities)),
            files=own("files", lambda records, environment: {}),
            claim=getattr(module, "claim", None),
        )


def record_tables(
    quantities: Sequence[Quantity], records: Sequence[Record], environment: Environment
) -> list[Table]:
    """One row per record, one column per quantity that was measured."""
    if not records:
        return []
    shown = [one for one in quantities if any(getattr(record, one.field) is not None for record in records)]
    rows = tuple(
        (record.case.label, str(record.case.tokens), *(_cell(getattr(record, one.field)) for one in shown))
        for record in records
        if record.status == "ok"
    )
    heads = (f"{one.name}, {one.unit}" if one.unit else one.name for one in shown)
    return [Table("Records", ("backend", "tokens", *heads), rows, failure_notes(records))]


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, (int, float)) else ", ".join(f"{one:.4g}" for one in value)


def _plots(quantities: Sequence[Quantity], records: Sequence[Record], environment: Environment) -> Plots:
    """The first quantity that was measured, against the length."""
    for one in quantities:
        if any(isinstance(getattr(record, one.field), (int, float)) for record in records):
            return {one.name: _against_tokens(one, records)}
    return {}


def _against_tokens(quantity: Quantity, records: Sequence[Record]) -> Plot:
    backends = {record.case.label: record.case.backend for record in records}
    styles = line_styles(list(backends.items()))
    series = []
    for label, style in styles.items():
        points = sorted(
            (record.case.tokens, value)
            for record in records
            if record.case.label == label and (value := getattr(record, quantity.field)) is not None
        )
        if points:
            x, y = zip(*points, strict=True)
            series.append(Series(label, x, y, style))
    lengths = sorted({record.case.tokens for record in records})
    chart = Chart(
        Axis("sequence length, tokens", "log2", "{:.0f}".format, lengths),
        Axis(f"{quantity.name}, {quantity.unit}" if quantity.unit else quantity.name),
        tuple(series),
    )
    return Plot(quantity.name, "", ((chart,),))
