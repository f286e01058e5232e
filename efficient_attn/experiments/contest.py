"""What a comparison is about: the backends, the q, k, v of all of them, and how they are measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efficient_attn.analysis.curves import YARDSTICK
from efficient_attn.errors import OptionError
from efficient_attn.experiments.workload import Workload, settle
from efficient_attn.measure.environment import available_bytes
from efficient_attn.problem import positive_count
from efficient_attn.sweep.amounts import parse_bytes
from efficient_attn.sweep.layers import joint_name, timed
from efficient_attn.sweep.variants import Variant, select

DEFAULT_INPUTS = "encoder"
DEFAULT_DRAWS = 4
# Times of a few backends at one length are short, and a verdict on them needs an interval.
DEFAULT_ROUNDS = 8
DEFAULT_MEMORY_LIMIT = "70%"

# Of Gaussian inputs, which have no length of their own.
DEFAULT_TOKENS, DEFAULT_NUM_HEADS, DEFAULT_HEAD_DIM = 2048, 8, 64

# Ranks of the best that a matrix of low rank could do.
ORACLE_RANKS = (32, 128)


@dataclass(frozen=True, kw_only=True)
class Contest:
    """What is compared, on what.

    Attributes:
        subjects: The q, k, v of each layer that errors are measured on.
        workload: Device, dtype and threads, settled.
        limit_bytes: Memory that a call may take; None where nobody knows what there is.
    """

    variants: tuple[Variant, ...]
    subjects: tuple[Any, ...]
    workload: Workload
    draws: int
    max_error: float
    limit_bytes: int | None

    @property
    def subject(self) -> Any:
        """The q, k, v that times and memory are measured on."""
        return self.subjects[timed(len(self.subjects))]

    @property
    def inputs(self) -> str:
        """The name of all subjects together."""
        return joint_name([subject.name for subject in self.subjects])

    @property
    def points(self) -> int:
        """Number of records, at most."""
        errors = len(self.subjects) * (len(self.variants) + 1 + len(self.ranks))
        return errors + 2 * (len(self.variants) + 1)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of the oracles; at full rank it is exact attention."""
        return tuple(rank for rank in ORACLE_RANKS if rank < self.subject.tokens)


def contest(
    backends: Sequence[Any] | None,
    *,
    inputs: str | Path,
    layer: int | None,
    tokens: int | None,
    max_error: float,
    options: Mapping[str, Mapping[str, Sequence[Any]]] | None,
    draws: int,
    norm: float,
    workload: Workload,
    memory_limit: str | int,
) -> Contest:
    """Everything that is to be compared, and its inputs; nothing runs."""
    if not 0 < max_error < float("inf"):
        raise OptionError(f"max_error is a finite number above 0, such as 0.1, not {max_error!r}.")
    positive_count("draws", draws)
    if tokens is not None:
        positive_count("tokens", tokens)
    settled = settle(workload)
    limit = parse_bytes(memory_limit, name="memory_limit", available=available_bytes(settled.device))
    chosen = select(backends, options)
    if all(variant.backend != YARDSTICK for variant in chosen):
        chosen = (*select([YARDSTICK]), *chosen)

    from efficient_attn.sweep.accuracy import try_options
    from efficient_attn.sweep.one_subject import layer_subjects

    subjects = layer_subjects(
        inputs,
        layer=layer,
        tokens=DEFAULT_TOKENS if tokens is None and inputs == "gaussian" else tokens,
        norm=norm,
        num_heads=settled.num_heads,
        head_dim=settled.head_dim,
        seed=settled.seed,
        dtype=settled.dtype,
        device=settled.device,
    )
    for variant in chosen:
        try_options(variant, subjects[0])
    return Contest(
        variants=chosen,
        subjects=subjects,
        workload=settled,
        draws=draws,
        max_error=max_error,
        limit_bytes=limit,
    )
