"""Views of the records of a comparison; records without a counterpart are shown as they are."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from efficient_attn.report.table import Table
from efficient_attn.runner.quantity import QUANTITIES
from efficient_attn.runner.records import Record
from efficient_attn.stats.rows import flat_row
from efficient_attn.studies.compare.grouping import (
    asked_error,
    comparison_rows,
    comparisons,
    without_compared,
)
from efficient_attn.studies.compare.plot import comparison_plot
from efficient_attn.studies.compare.sentences import comparison_sentences
from efficient_attn.studies.compare.tables import comparison_tables
from efficient_attn.studies.view import Environment, Plots, record_tables


def claim(records: Sequence[Record]) -> list[Record]:
    """The records of comparisons."""
    left = set(map(id, without_compared(records, comparisons(records))))
    return [record for record in records if id(record) not in left]


def tables(records: Sequence[Record], environment: Environment) -> list[Table]:
    """One table for each comparison, and the records that belong to none."""
    left = without_compared(records, comparisons(records))
    shown = [QUANTITIES[name] for name in ("output_relative_error", "peak_bytes")]
    return comparison_tables(records) + (record_tables(shown, left, environment) if left else [])


def sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """The verdict of each comparison."""
    return comparison_sentences(records, asked_error(environment), environment)


def rows(records: Sequence[Record], environment: Environment) -> list[dict[str, Any]]:
    """One row per backend and comparison, then the records that belong to none."""
    left = without_compared(records, comparisons(records))
    return comparison_rows(records) + list(map(flat_row, left))


def plots(records: Sequence[Record], environment: Environment) -> Plots:
    """The figure of all comparisons."""
    drawn = partial(comparison_plot, records, asked_error(environment))
    return {"comparison": drawn} if comparisons(records) else {}
