"""Views of the records of errors."""

from collections.abc import Sequence

from efficient_attn.report.table import Table
from efficient_attn.runner.record import Record
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
    return {"error": error_plot(records)} if measured else {}
