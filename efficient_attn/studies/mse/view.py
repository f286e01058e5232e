"""Views of the records of errors."""

from collections.abc import Sequence

from efficient_attn.measure.record import Record
from efficient_attn.report.table import Table
from efficient_attn.studies.mse import kernel_view
from efficient_attn.studies.mse.overview import overview_tables
from efficient_attn.studies.mse.plot import error_plot
from efficient_attn.studies.mse.sentences import sentences as error_sentences
from efficient_attn.studies.mse.tables import error_tables
from efficient_attn.studies.view import Environment, Plots


def tables(records: Sequence[Record], environment: Environment) -> list[Table]:
    """Errors by input and size, and all inputs side by side at the largest size; or kernel entries."""
    if _of_kernel(records):
        return kernel_view.tables(records)
    return [*error_tables(records), *overview_tables(records)]


def plots(records: Sequence[Record], environment: Environment) -> Plots:
    """Errors against size."""
    if _of_kernel(records):
        return kernel_view.plots(records)
    return {"error": error_plot(records)} if any(record.status == "ok" for record in records) else {}


def sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """The scatter of random features, and backends that are useful; or agreement with theory."""
    if _of_kernel(records):
        return kernel_view.sentences(records)
    return error_sentences(records, environment)


def _of_kernel(records: Sequence[Record]) -> bool:
    """Whether entries of the softmax kernel were measured."""
    return any(record.case.of == "kernel" for record in records)
