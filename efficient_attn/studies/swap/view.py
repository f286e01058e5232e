"""Views of the records of converted models."""

from collections.abc import Sequence

from efficient_attn.runner.records import Record
from efficient_attn.runner.sizes import MODEL
from efficient_attn.studies.swap.plot import swap_plot
from efficient_attn.studies.swap.sentences import sentences as sentences
from efficient_attn.studies.swap.tables import tables as tables
from efficient_attn.studies.view import Environment, Plots


def claim(records: Sequence[Record]) -> list[Record]:
    """The records of models."""
    return [record for record in records if record.case.of == MODEL]


def plots(records: Sequence[Record], environment: Environment) -> Plots:
    """The only plot."""
    return {"swap": swap_plot(records)} if records else {}
