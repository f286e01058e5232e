"""Views of the records of errors, which have no folder of their own yet."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from efficient_attn.analysis.head_errors import HEADS
from efficient_attn.analysis.kernel import kernel_records
from efficient_attn.analysis.rows import flat_row
from efficient_attn.errors import OptionError, UnknownNameError
from efficient_attn.report.error_overview import overview_tables
from efficient_attn.report.error_plot import RELATIVE, error_plot
from efficient_attn.report.figures import Plot
from efficient_attn.report.head_errors import head_error_tables, head_plot
from efficient_attn.report.kernel_errors import kernel_sentences, kernel_tables
from efficient_attn.report.kernel_plot import OVER, kernel_plot, kernel_plots
from efficient_attn.report.parts import part_tables
from efficient_attn.report.table import Table
from efficient_attn.sweep.case import Record
from efficient_attn.sweep.quantity import samples

# Tables and sentences of errors; loaded when there are errors to show.
_ERROR_REPORTS = (
    "efficient_attn.report.error_table",
    "efficient_attn.experiments.mse",
)

Environment = Mapping[str, Any]


def tables(records: Sequence[Record], environment: Environment) -> list[Table]:
    """Tables of errors."""
    made: list[Table] = []
    if errors := _errors_of(records):
        made += _errors("tables")(errors) + overview_tables(errors)
        made += head_error_tables(errors) + part_tables(errors)
    return made + kernel_tables(records)


def plot(
    records: Sequence[Record], environment: Environment, y: str | None = None, x: str | None = None
) -> Plot:
    """An error of every backend against the size."""
    y = y or RELATIVE
    if y in OVER or (kernel_records(records) and not _errors_of(records)):
        return kernel_plot(records, x or OVER.get(y, "size"))
    if y == HEADS:
        return head_plot(_errors_of(records))
    if y not in samples().values():
        raise UnknownNameError("quantity to plot", y, samples().values())
    if x not in (None, "size"):
        raise OptionError(f"x is size for errors, not {x!r}.")
    return error_plot(_errors_of(records), y)


def sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """Findings on errors."""
    errors = _errors_of(records)
    found = _errors("sentences")(errors, environment=environment) if errors else []
    return list(found) + kernel_sentences(records)


def rows(records: Sequence[Record], environment: Environment) -> list[dict[str, Any]]:
    """One flat row per error."""
    return [flat_row(record) for record in records if record.case.kind == "error"]


def plots(records: Sequence[Record], environment: Environment) -> dict[str, Callable[[], Plot]]:
    """The plots worth a file."""
    measured = any(record.status == "ok" for record in _errors_of(records))
    found = {"error": RELATIVE} if measured else {}
    found |= {"error-heads": HEADS} if any(getattr(r, HEADS) for r in records) else {}
    found |= kernel_plots(records)
    return {name: partial(plot, records, environment, quantity) for name, quantity in found.items()}


def _errors_of(records: Sequence[Record]) -> list[Record]:
    """Errors of outputs and weights; errors of a kernel entry are of no input, and are apart."""
    kernel = set(map(id, kernel_records(records)))
    return [record for record in records if record.case.kind == "error" and id(record) not in kernel]


def _errors(verb: str) -> Callable[..., Any]:
    """`tables` or `sentences` of errors, from the first of their modules that has it."""
    for name in _ERROR_REPORTS:
        if find_spec(name) is not None and hasattr(module := import_module(name), verb):
            return getattr(module, verb)
    raise UnknownNameError("report of errors", verb, ["to_pandas", "summary"])
