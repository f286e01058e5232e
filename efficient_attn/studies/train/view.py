"""Views of the records of training."""

from collections.abc import Sequence
from functools import partial

from efficient_attn.runner.records import Record
from efficient_attn.studies.train.plot import TRAINING, training_plot
from efficient_attn.studies.train.tables import sentences as sentences
from efficient_attn.studies.train.tables import tables as tables
from efficient_attn.studies.view import Environment, Plots


def plots(records: Sequence[Record], environment: Environment) -> Plots:
    """The only plot."""
    known = any(record.train_steps for record in records)
    return {TRAINING: partial(training_plot, records)} if known else {}
