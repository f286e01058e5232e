"""Views of the records of converted models."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from efficient_attn.studies.swap.analysis import rows as rows
from efficient_attn.studies.swap.plan import MODEL
from efficient_attn.studies.swap.plot import SWAP, plot_swaps
from efficient_attn.studies.swap.sentences import sentences as sentences
from efficient_attn.studies.swap.tables import tables as tables
from efficient_attn.studies.view import Environment
from efficient_attn.sweep.records import Record


def claim(records: Sequence[Record]) -> list[Record]:
    """The records of models."""
    return [record for record in records if record.case.of == MODEL]


def plots(records: Sequence[Record], environment: Environment) -> dict[str, Callable[[], Any]]:
    """The only plot."""
    return {SWAP: partial(plot_swaps, records)} if records else {}
