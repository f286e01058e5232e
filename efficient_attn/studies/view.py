"""How the records of a study are shown: functions of its folder, and defaults made from its quantities."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from efficient_attn.analysis.rows import flat_row
from efficient_attn.report.drawings import Drawing, figure
from efficient_attn.report.table import Table
from efficient_attn.sweep.case import Record
from efficient_attn.sweep.quantity import Quantity

Environment = Mapping[str, Any]
Plots = dict[str, Callable[[], Any]]


@dataclass(frozen=True, kw_only=True)
class View:
    """Functions of (records, environment) of one run.

    Attributes:
        tables: Tables of text.
        sentences: Findings, computed from the records.
        rows: Flat rows of the summary.
        plots: {name of the file: function that draws it and returns its axes}.
        plot: The axes of one quantity, `plot(records, environment, y, x, ax)`.
        drawings: Figures of the page, `drawings(records, environment, name=…, beside=…)`.
        claim: The records that belong to the study where no environment names it; None: those of its kinds.
    """

    tables: Callable[[Sequence[Record], Environment], list[Table]]
    sentences: Callable[[Sequence[Record], Environment], list[str]]
    rows: Callable[[Sequence[Record], Environment], list[dict[str, Any]]]
    plots: Callable[[Sequence[Record], Environment], Plots]
    plot: Callable[..., Any]
    drawings: Callable[..., list[Drawing]]
    claim: Callable[[Sequence[Record]], list[Record]] | None = None

    @classmethod
    def of(cls, quantities: Sequence[Quantity], module: Any) -> "View":
        """The functions of a module, or of nothing, completed by the defaults."""

        def own(name: str, default: Callable[..., Any]) -> Callable[..., Any]:
            return getattr(module, name, default)

        plots = own("plots", partial(_plots, quantities))
        return cls(
            tables=own("tables", partial(_tables, quantities)),
            sentences=own("sentences", lambda records, environment: []),
            rows=own("rows", lambda records, environment: [flat_row(record) for record in records]),
            plots=plots,
            plot=own("plot", partial(_plot, plots)),
            drawings=own("drawings", partial(_drawings, plots)),
            claim=getattr(module, "claim", None),
        )


def _tables(
    quantities: Sequence[Quantity], records: Sequence[Record], environment: Environment
) -> list[Table]:
    """One row per record, one column per quantity that was measured."""
    shown = [one for one in quantities if any(getattr(record, one.field) is not None for record in records)]
    rows = tuple(
        (record.case.label, str(record.case.tokens), *(_cell(getattr(record, one.field)) for one in shown))
        for record in records
        if record.status == "ok"
    )
    heads = (f"{one.name}, {one.unit}" if one.unit else one.name for one in shown)
    failed = (f"{r.case.label}: {r.status}: {r.reason}" for r in records if r.status != "ok")
    return [Table("Records", ("backend", "tokens", *heads), rows, tuple(dict.fromkeys(failed)))]


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, (int, float)) else ", ".join(f"{one:.4g}" for one in value)


def _plots(quantities: Sequence[Quantity], records: Sequence[Record], environment: Environment) -> Plots:
    """The first quantity that was measured, against the length."""
    for one in quantities:
        if any(isinstance(getattr(record, one.field), (int, float)) for record in records):
            return {one.name: partial(_against_tokens, one, records)}
    return {}


def _against_tokens(quantity: Quantity, records: Sequence[Record]) -> Any:
    from matplotlib.figure import Figure

    axes = Figure(figsize=(7.0, 4.5), layout="constrained").subplots()
    for label in dict.fromkeys(record.case.label for record in records):
        points = sorted(
            (record.case.tokens, getattr(record, quantity.field))
            for record in records
            if record.case.label == label and getattr(record, quantity.field) is not None
        )
        axes.plot(*zip(*points, strict=True), "o-", label=label)
    axes.set_xlabel("tokens")
    axes.set_ylabel(f"{quantity.name}, {quantity.unit}" if quantity.unit else quantity.name)
    axes.legend(frameon=False)
    return axes


def _plot(
    plots: Callable[..., Plots],
    records: Sequence[Record],
    environment: Environment,
    y: str | None = None,
    x: str | None = None,
    ax: Any = None,
) -> Any:
    from efficient_attn.errors import DataError, UnknownNameError

    made = plots(records, environment)
    if not made:
        raise DataError("There is nothing to plot: no record holds a number.")
    if y is not None and y not in made:
        raise UnknownNameError("quantity to plot", y, made)
    return (made[y] if y is not None else next(iter(made.values())))()


def _drawings(
    plots: Callable[..., Plots],
    records: Sequence[Record],
    environment: Environment,
    *,
    name: str,
    beside: Sequence[Sequence[Record]] = (),
) -> list[Drawing]:
    made = plots(records, environment)
    return [figure(draw(), f"{name}-{plot}") for plot, draw in made.items()]
