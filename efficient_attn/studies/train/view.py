"""Views of the records of training."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from efficient_attn.studies.train.analysis import rows as rows
from efficient_attn.studies.train.plot import TRAINING, plot_training
from efficient_attn.studies.train.tables import sentences as sentences
from efficient_attn.studies.train.tables import tables as tables
from efficient_attn.studies.view import Environment
from efficient_attn.sweep.records import Record


def plots(records: Sequence[Record], environment: Environment) -> dict[str, Callable[[], Any]]:
    """The only plot."""
    known = any(record.train_steps for record in records)
    return {TRAINING: partial(plot_training, records)} if known else {}
