"""Views of the records of a comparison."""

from collections.abc import Sequence

from efficient_attn.runner.records import Record
from efficient_attn.studies.compare.analysis import asked_error, comparisons
from efficient_attn.studies.compare.plot import comparison_plot
from efficient_attn.studies.compare.sentences import sentences as sentences
from efficient_attn.studies.compare.tables import tables as tables
from efficient_attn.studies.view import Environment, Plots


def claim(records: Sequence[Record]) -> list[Record]:
    """The records of comparisons."""
    keys = {record.case.key for one in comparisons(records) for record in one.records}
    return [record for record in records if record.case.key in keys]


def plots(records: Sequence[Record], environment: Environment) -> Plots:
    """The figure of all comparisons."""
    return {"comparison": comparison_plot(records, asked_error(environment))} if comparisons(records) else {}
