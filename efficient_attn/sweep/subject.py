"""What backends are measured on, and the exact output there."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from efficient_attn.measure import error as measure
from efficient_attn.measure.inputs import Activations

# More rows of each head change the second digit of a median of pairs no more.
_MOST_ROWS = 256


@dataclass(frozen=True, eq=False)
class Subject:
    """Inputs under a name.

    Attributes:
        name: What records call it, such as `gaussian(norm=0.5)`.
        activations: q, k, v in the dtype that backends compute in.
        scale: Factor on q·k.
        seed: Of the inputs, where they are drawn.
    """

    name: str
    activations: Activations
    scale: float
    seed: int = 0

    @cached_property
    def exact(self) -> Tensor:
        """The exact output in float64."""
        return measure.exact_output(*self.activations, scale=self.scale)

    @property
    def pair_norm(self) -> float:
        """Median of |x + y|² over queries and keys, x = √scale·q and y = √scale·k: of at most 256 of each."""
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
    """Rows spread evenly over the tokens."""
    return tensor[..., :: max(tensor.shape[-2] // _MOST_ROWS, 1), :]
