"""Views of the records of errors."""

from collections.abc import Sequence
from functools import partial

from efficient_attn.errors import OptionError, UnknownNameError
from efficient_attn.report.figures import Plot
from efficient_attn.report.table import Table
from efficient_attn.runner.quantity import samples
from efficient_attn.runner.record import Record
from efficient_attn.studies.mse.analysis import RELATIVE
from efficient_attn.studies.mse.overview import overview_tables
from efficient_attn.studies.mse.plot import error_plot
from efficient_attn.studies.mse.sentences import sentences as sentences
from efficient_attn.studies.mse.tables import error_tables
from efficient_attn.studies.view import Environment, Plots


def tables(records: Sequence[Record], environment: Environment) -> list[Table]:
    """Errors by input and size, and all inputs side by side at the largest size."""
    return [*error_tables(records), *overview_tables(records)]


def plots(records: Sequence[Record], environment: Environment) -> Plots:
    """Errors against size."""
    measured = any(record.status == "ok" for record in records)
    return {"error": partial(error_plot, records)} if measured else {}


def plot(
    records: Sequence[Record], environment: Environment, y: str | None = None, x: str | None = None
) -> Plot:
    """One error of every backend against its size."""
    if y not in (None, *samples().values()):
        raise UnknownNameError("quantity to plot", y or "", samples().values())
    if x not in (None, "size"):
        raise OptionError(f"x is size for errors, not {x!r}.")
    return error_plot(records, y or RELATIVE)
