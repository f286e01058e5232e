"""Views of the records of a benchmark."""

from collections.abc import Sequence

from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import MODEL
from efficient_attn.studies.bench.plot import plots as plots
from efficient_attn.studies.bench.sentences import sentences as sentences
from efficient_attn.studies.bench.tables import tables as tables

_KINDS = ("time", "memory")


def claim(records: Sequence[Record]) -> list[Record]:
    """Times and memory of all but whole models."""
    return [record for record in records if record.case.kind in _KINDS and record.case.of != MODEL]
