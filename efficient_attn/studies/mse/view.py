"""Views of the records of errors."""

from collections.abc import Sequence
from functools import partial

from efficient_attn.errors import OptionError, UnknownNameError
from efficient_attn.report.figures import Plot
from efficient_attn.report.table import Table
from efficient_attn.runner.quantity import samples
from efficient_attn.runner.record import Record
from efficient_attn.studies.mse.analysis import RELATIVE
from efficient_attn.studies.mse.heads import HEADS, head_error_tables, head_plot
from efficient_attn.studies.mse.overview import overview_tables
from efficient_attn.studies.mse.parts import part_tables
from efficient_attn.studies.mse.plot import error_plot
from efficient_attn.studies.mse.sentences import sentences as sentences
from efficient_attn.studies.mse.tables import error_tables
from efficient_attn.studies.view import Environment, Plots


def tables(records: Sequence[Record], environment: Environment) -> list[Table]:
    """Errors by input and size, at the largest size, by head and by part."""
    makers = (error_tables, overview_tables, head_error_tables, part_tables)
    return [table for make in makers for table in make(records)]


def plots(records: Sequence[Record], environment: Environment) -> Plots:
    """Errors against size, and by head."""
    found: Plots = {}
    if any(record.status == "ok" for record in records):
        found["error"] = partial(error_plot, records)
    if any(getattr(record, HEADS) for record in records):
        found["error-heads"] = partial(head_plot, records)
    return found


def plot(
    records: Sequence[Record], environment: Environment, y: str | None = None, x: str | None = None
) -> Plot:
    """One error of every backend against its size, or the errors by head."""
    if y == HEADS:
        return head_plot(records)
    if y not in (None, *samples().values()):
        raise UnknownNameError("quantity to plot", y or "", [*samples().values(), HEADS])
    if x not in (None, "size"):
        raise OptionError(f"x is size for errors, not {x!r}.")
    return error_plot(records, y or RELATIVE)
