"""Views of the records of a benchmark: of one process, and of several ranks."""

from collections.abc import Sequence

from efficient_attn.report.table import Table
from efficient_attn.runner.records import Record
from efficient_attn.runner.sizes import MODEL
from efficient_attn.studies.bench import plot
from efficient_attn.studies.bench import sentences as texts
from efficient_attn.studies.bench import tables as of_one_process
from efficient_attn.studies.bench.rank_view import rank_plot, rank_sentences, rank_tables
from efficient_attn.studies.view import Environment, Plots

_KINDS = ("time", "memory")


def claim(records: Sequence[Record]) -> list[Record]:
    """Times and memory of all but whole models."""
    return [record for record in records if record.case.kind in _KINDS and record.case.of != MODEL]


def tables(records: Sequence[Record], environment: Environment) -> list[Table]:
    """Tables of one process, then of several ranks."""
    alone, shared = _split(records)
    return [*of_one_process.tables(alone, environment), *rank_tables(shared)]


def sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """Speeds and crossovers, or the verdict on versions; the agreement of the cost model on several ranks."""
    alone, shared = _split(records)
    return [*texts.sentences(alone, environment), *rank_sentences(shared)]


def plots(records: Sequence[Record], environment: Environment) -> Plots:
    """Costs against the length, and times against the number of ranks."""
    alone, shared = _split(records)
    on_ranks = {"ranks": rank_plot(shared)} if any(one.status == "ok" for one in shared) else {}
    return {**plot.plots(alone, environment), **on_ranks}


def _split(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Records of one process, and of several that share a sequence."""
    shared = [one for one in records if one.case.ranks is not None]
    return [one for one in records if one.case.ranks is None], shared
