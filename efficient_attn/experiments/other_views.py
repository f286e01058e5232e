"""Views of the records of studies that have no folder of their own yet."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from efficient_attn.analysis.comparison import asked_error, comparison_rows, comparisons, without_compared
from efficient_attn.analysis.curves import QUANTITIES
from efficient_attn.analysis.head_errors import HEADS
from efficient_attn.analysis.kernel import kernel_records
from efficient_attn.analysis.rows import flat_row
from efficient_attn.analysis.summary import summary
from efficient_attn.errors import OptionError, UnknownNameError
from efficient_attn.report.comparison import comparison_sentences, comparison_tables
from efficient_attn.report.comparison_plot import COMPARISON, comparison_plot
from efficient_attn.report.cost_table import tables as cost_tables
from efficient_attn.report.error_overview import overview_tables
from efficient_attn.report.error_plot import RELATIVE, error_plot
from efficient_attn.report.figures import Plot
from efficient_attn.report.head_errors import head_error_tables, head_plot
from efficient_attn.report.heads import head_tables
from efficient_attn.report.kernel_errors import kernel_sentences, kernel_tables
from efficient_attn.report.kernel_plot import OVER, kernel_plot, kernel_plots
from efficient_attn.report.parts import part_tables
from efficient_attn.report.pays import crossover_tables
from efficient_attn.report.plot import cost_plot
from efficient_attn.report.sentences import bench_sentences
from efficient_attn.report.table import Table
from efficient_attn.sweep.case import Record
from efficient_attn.sweep.quantity import KINDS, samples

# Tables and sentences of errors; loaded when there are errors to show.
_ERROR_REPORTS = (
    "efficient_attn.report.error_table",
    "efficient_attn.experiments.mse",
)

Environment = Mapping[str, Any]


def tables(records: Sequence[Record], environment: Environment) -> list[Table]:
    """Tables of comparisons, costs and errors."""
    alone = _apart(records)
    costs = [record for record in alone if record.case.kind in QUANTITIES.values()]
    made = [
        *comparison_tables(records),
        *cost_tables(costs),
        *crossover_tables(costs),
        *head_tables(costs),
    ]
    errors = _of_kind(alone, "error")
    if errors:
        made += _errors("tables")(errors) + overview_tables(errors)
        made += head_error_tables(errors) + part_tables(errors)
    return made + kernel_tables(records)


def plot(
    records: Sequence[Record], environment: Environment, y: str | None = None, x: str | None = None
) -> Plot:
    """One quantity of every backend against tokens, or an error against the size."""
    y = y or (COMPARISON if comparisons(records) else None)
    y = y or ("time_s" if _of_kind(records, "time") else RELATIVE)
    if y == COMPARISON:
        return comparison_plot(records, asked_error(environment))
    if y in QUANTITIES:
        if x not in (None, "tokens"):
            raise UnknownNameError(f"x axis for {y}", str(x), ["tokens"])
        return cost_plot(records, y)
    if y in OVER or (kernel_records(records) and not _of_kind(records, "error")):
        return kernel_plot(records, x or OVER.get(y, "size"))
    if y == HEADS:
        return head_plot(_of_kind(records, "error"))
    if y not in samples().values():
        raise UnknownNameError("quantity to plot", y, [*QUANTITIES, *samples().values()])
    if x not in (None, "size"):
        raise OptionError(f"x is size for errors, not {x!r}.")
    return error_plot(_of_kind(records, "error"), y)


def sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """Findings on comparisons, costs and errors."""
    alone = _apart(records)
    found = comparison_sentences(records, asked_error(environment), environment)
    found += bench_sentences(alone, environment)
    errors = _of_kind(alone, "error")
    found += _errors("sentences")(errors, environment=environment) if errors else []
    return found + kernel_sentences(records)


def rows(records: Sequence[Record], environment: Environment) -> list[dict[str, Any]]:
    """Flat rows: comparisons; time and memory of a backend at a length side by side; then errors."""
    alone = _apart(records)
    errors = [flat_row(record) for record in alone if record.case.kind == "error"]
    return comparison_rows(records) + summary(alone) + errors


def plots(records: Sequence[Record], environment: Environment) -> dict[str, Callable[[], Plot]]:
    """The plots worth a file."""
    return {
        name: partial(plot, records, environment, quantity) for name, quantity in _quantities(records).items()
    }


def _quantities(records: Sequence[Record]) -> dict[str, str]:
    alone = _apart(records)
    ok = {kind for kind in KINDS if any(record.status == "ok" for record in _of_kind(alone, kind))}
    wanted = {"time": "time_s", "memory": "peak_bytes", "error": RELATIVE}
    found = {COMPARISON: COMPARISON} if comparisons(records) else {}
    found |= {kind: quantity for kind, quantity in wanted.items() if kind in ok}
    found |= {"error-heads": HEADS} if any(getattr(r, HEADS) for r in records) else {}
    return found | kernel_plots(records)


def _apart(records: Sequence[Record]) -> list[Record]:
    """Without the records of comparisons, which are shown in their own ways."""
    return list(without_compared(records, comparisons(records)))


def _of_kind(records: Sequence[Record], kind: str) -> list[Record]:
    """Records of a kind; errors of a kernel entry are of no input, and are apart."""
    kernel = set(map(id, kernel_records(records)))
    return [record for record in records if record.case.kind == kind and id(record) not in kernel]


def _errors(verb: str) -> Callable[..., Any]:
    """`tables` or `sentences` of errors, from the first of their modules that has it."""
    for name in _ERROR_REPORTS:
        if find_spec(name) is not None and hasattr(module := import_module(name), verb):
            return getattr(module, verb)
    raise UnknownNameError("report of errors", verb, ["to_pandas", "summary"])
