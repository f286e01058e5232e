"""Views of the records of errors."""

from collections.abc import Sequence

from efficient_attn.report.table import Table
from efficient_attn.runner.record import Record
from efficient_attn.studies.mse.analysis import NAMES
from efficient_attn.studies.mse.overview import overview_tables
from efficient_attn.studies.mse.plot import error_plot
from efficient_attn.studies.mse.sentences import sentences as error_sentences
from efficient_attn.studies.mse.tables import error_tables
from efficient_attn.studies.view import Environment, Plots, record_tables


def tables(records: Sequence[Record], environment: Environment) -> list[Table]:
    """Errors by input and size, and all inputs side by side at the largest size; other errors as they are."""
    if _of_weights(records):
        return record_tables(records, environment)
    return [*error_tables(records), *overview_tables(records)]


def plots(records: Sequence[Record], environment: Environment) -> Plots:
    """Errors against size."""
    measured = any(record.status == "ok" for record in records)
    return {"error": error_plot(records)} if measured and not _of_weights(records) else {}


def sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """The scatter of random features, and backends that are useful."""
    return [] if _of_weights(records) else error_sentences(records, environment)


def _of_weights(records: Sequence[Record]) -> bool:
    """Whether a former run measured errors of attention weights alone."""
    measured = {name for record in records for name in record.measured}
    return bool(measured) and not measured & {*NAMES}
