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
from efficient_attn.sweep.variants import Variant, select

DEFAULT_INPUTS = "encoder"
DEFAULT_DRAWS = 4
DEFAULT_MEMORY_LIMIT = "70%"

# Of Gaussian inputs, which have no length of their own.
DEFAULT_TOKENS, DEFAULT_NUM_HEADS, DEFAULT_HEAD_DIM = 2048, 8, 64

# Ranks of the best that a matrix of low rank could do.
ORACLE_RANKS = (32, 128)


@dataclass(frozen=True, kw_only=True)
class Contest:
    """What is compared, on what.

    Attributes:
        subject: The q, k, v of everything.
        workload: Device, dtype and threads, settled.
        limit_bytes: Memory that a call may take; None where nobody knows what there is.
    """

    variants: tuple[Variant, ...]
    subject: Any
    workload: Workload
    draws: int
    max_error: float
    limit_bytes: int | None

    @property
    def points(self) -> int:
        """How many records there will be at most."""
        return 3 * (len(self.variants) + 1) + len(self.ranks)

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
    from efficient_attn.sweep.one_subject import one_subject

    subject = one_subject(
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
        try_options(variant, subject)
    return Contest(
        variants=chosen,
        subject=subject,
        workload=settled,
        draws=draws,
        max_error=max_error,
        limit_bytes=limit,
    )
