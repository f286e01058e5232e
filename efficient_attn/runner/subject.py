"""Inputs of a measurement, and the exact output for them."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from efficient_attn.measure import error as measure
from efficient_attn.measure.inputs import Activations

# Rows per head for a median of pairs; more rows do not change its second digit.
_MOST_ROWS = 256


@dataclass(frozen=True, eq=False)
class Subject:
    """Named inputs.

    Attributes:
        name: Name in records, such as `gaussian(norm=0.5)`.
        activations: q, k, v in the dtype of the computation.
        scale: Factor on q·k.
        seed: Random seed of Gaussian inputs.
        causal: Causal masking.
    """

    name: str
    activations: Activations
    scale: float
    seed: int = 0
    causal: bool = False

    @cached_property
    def exact(self) -> Tensor:
        """Exact output in float64."""
        return measure.exact_output(*self.activations, scale=self.scale, causal=self.causal)

    @property
    def pair_norm(self) -> float:
        """Median of |x + y|² over at most 256 queries x = √scale·q and keys y = √scale·k."""
        q, k = (_spread(tensor).double() for tensor in self.activations[:2])
        heads = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(heads, dim=1)
        squares = q.square().sum(-1)[..., :, None] + k.square().sum(-1)[..., None, :] + 2 * q @ k.mT
        return float(self.scale * squares.median())

    @property
    def tokens(self) -> int:
        return self.activations.k.shape[-2]

    @property
    def head_dim(self) -> int:
        return self.activations.q.shape[-1]


def _spread(tensor: Tensor) -> Tensor:
    """Rows evenly spaced over the tokens."""
    return tensor[..., :: max(tensor.shape[-2] // _MOST_ROWS, 1), :]
