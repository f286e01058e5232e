"""Attention problem: the sizes and kind of attention known before any tensor exists."""

import math
from dataclasses import dataclass

from efficient_attn.errors import DtypeError, OptionError
from efficient_attn.limits import COUNT
from efficient_attn.options import whole_number


@dataclass(frozen=True, kw_only=True)
class AttentionProblem:
    """Sizes and kind of attention that a backend is built for.

    Attributes:
        head_dim: Entries of one query or key.
        num_heads: Number of query heads; None: any number.
        max_tokens: Longest sequence; None: unlimited.
        causal: Whether position i attends to positions up to i; queries are the last positions of the keys.
        scale: Factor on q·k; None: 1/√head_dim.
    """

    head_dim: int
    num_heads: int | None = None
    max_tokens: int | None = None
    causal: bool = False
    scale: float | None = None

    def __post_init__(self) -> None:
        positive_count("head_dim", self.head_dim)
        for name in ("num_heads", "max_tokens"):
            if getattr(self, name) is not None:
                positive_count(name, getattr(self, name))
        if not isinstance(self.causal, bool):
            raise DtypeError(f"causal is True or False, not {self.causal!r}.")
        number = isinstance(self.scale, (int, float)) and not isinstance(self.scale, bool)
        if self.scale is not None and not (number and math.isfinite(self.scale)):
            raise OptionError(f"scale is a finite number, not {self.scale!r}.")

    @property
    def factor(self) -> float:
        """The factor on q·k: `scale`, or 1/√head_dim."""
        return self.head_dim**-0.5 if self.scale is None else float(self.scale)


def positive_count(name: str, value: object) -> None:
    """Refuse anything but a whole number of at least 1."""
    whole_number(name, value, least=1, most=COUNT)
