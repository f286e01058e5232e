"""Views of the records of a benchmark."""

from collections.abc import Sequence

from efficient_attn.report.table import Table
from efficient_attn.runner.records import Record
from efficient_attn.runner.sizes import MODEL
from efficient_attn.studies.bench.plot import plots as plots
from efficient_attn.studies.bench.sentences import sentences as sentences
from efficient_attn.studies.bench.tables import cost_tables
from efficient_attn.studies.bench.versions import version_tables
from efficient_attn.studies.view import Environment

_KINDS = ("time", "memory")


def claim(records: Sequence[Record]) -> list[Record]:
    """Times and memory of all but whole models."""
    return [record for record in records if record.case.kind in _KINDS and record.case.of != MODEL]


def tables(records: Sequence[Record], environment: Environment) -> list[Table]:
    """Times, peak memory, and two versions."""
    return cost_tables(records) + version_tables(records, environment)
