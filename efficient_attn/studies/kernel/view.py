"""Views of the records of kernel entries."""

from collections.abc import Sequence

from efficient_attn.runner.record import Record
from efficient_attn.studies.kernel.plot import plot as plot
from efficient_attn.studies.kernel.plot import plots as plots
from efficient_attn.studies.kernel.tables import sentences as sentences
from efficient_attn.studies.kernel.tables import tables as tables


def claim(records: Sequence[Record]) -> list[Record]:
    """Errors of kernel entries."""
    return [record for record in records if (record.case.kind, record.case.of) == ("error", "kernel")]
