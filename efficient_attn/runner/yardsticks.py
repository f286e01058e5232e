"""Baselines of an error, in the record format of backends."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from efficient_attn.measure import error as measure
from efficient_attn.measure import yardsticks as lines
from efficient_attn.runner.accuracy import error_case, output_record, weights_record
from efficient_attn.runner.questions import Question
from efficient_attn.runner.records import Record
from efficient_attn.runner.sizes import MEAN_OF_VALUES, ORACLE, TAYLOR, with_size
from efficient_attn.runner.subject import Subject
from efficient_attn.runner.variants import Variant
from efficient_attn.runner.worker import answer

TAYLOR_ORDERS = (1, 2)

# Largest rank for long sequences.
_LONG, _MOST_OF_LONG = 1024, 256


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """A baseline for errors.

    Attributes:
        variant: Its backend and label in records.
        order: Order of a Taylor series.
        rank: Rank of the best approximation of the exact weights.
    """

    variant: Variant
    order: int | None = None
    rank: int | None = None


def mean_of_values() -> Yardstick:
    """Uniform attention: every query gets the mean of the values."""
    return Yardstick(variant=Variant(backend=MEAN_OF_VALUES, label=MEAN_OF_VALUES, target=None))


def taylor(order: int, head_dim: int) -> Yardstick:
    """Attention with exp replaced by its Taylor series of order 1 or 2."""
    options = {"order": order, "num_features": lines.taylor_features(head_dim, order)}
    label = f"{TAYLOR} order {order}"
    return Yardstick(variant=Variant(backend=TAYLOR, label=label, target=None, options=options), order=order)


def ranks_of(sizes: Sequence[int], tokens: int) -> list[int]:
    """The measured ranks; high ranks of a long sequence would take longer than all backends."""
    return [size for size in sizes if size < tokens and (tokens <= _LONG or size <= _MOST_OF_LONG)]


def oracle(rank: int) -> Yardstick:
    """The best approximation of this rank to the exact weights."""
    bare = Variant(backend=ORACLE, label=ORACLE, target=None)
    return Yardstick(variant=with_size(bare, "rank", rank), rank=rank)


def measure_yardstick(
    yardstick: Yardstick, subject: Subject, question: Question, *, ranks: int = 0, threads: int | None = None
) -> Record:
    """Measure the error of a baseline.

    Args:
        ranks: Largest rank that will be requested for this subject.
    """
    case = error_case(yardstick.variant, subject, question.of, threads=threads)

    def measured() -> Record:
        if question.metrics == ("unsafe",):
            return Record(case=case, unsafe_rows=0.0)
        with torch.no_grad():
            if question.of == "weights":
                return weights_record(case, subject, question, [_weights(yardstick, subject, ranks)])
            return output_record(case, subject, question, [_output(yardstick, subject, ranks)])

    return answer(case, measured)


def _output(yardstick: Yardstick, subject: Subject, ranks: int) -> Tensor:
    q, k, v = subject.activations
    if yardstick.order is not None:
        return lines.taylor_output(q, k, v, scale=subject.scale, order=yardstick.order)
    if yardstick.rank is None:
        return measure.mean_of_values(q, v, causal=subject.causal)
    weights, directions = _leading(subject, ranks)
    return lines.low_rank_output(weights, directions[..., : yardstick.rank], v)


def _weights(yardstick: Yardstick, subject: Subject, ranks: int) -> Tensor:
    q, k, _ = subject.activations
    if yardstick.order is not None:
        return lines.taylor_weights(q, k, scale=subject.scale, order=yardstick.order)
    if yardstick.rank is None:
        return measure.uniform_weights(q, k)
    weights, directions = _leading(subject, ranks)
    return lines.low_rank_weights(weights, directions[..., : yardstick.rank])


@lru_cache(maxsize=1)
def _leading(subject: Subject, ranks: int) -> tuple[Tensor, Tensor]:
    """Exact weights and their leading directions; cached for the last subject."""
    q, k, _ = subject.activations
    lines.check_size(q, k)
    weights = lines.exact_weights(q, k, scale=subject.scale, causal=subject.causal)
    return weights, lines.leading_directions(weights, ranks)
