"""What backends are measured on, and the exact output there."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from efficient_attn.measure import error as measure
from efficient_attn.measure.inputs import Activations


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
    def tokens(self) -> int:
        return self.activations.k.shape[-2]

    @property
    def head_dim(self) -> int:
        return self.activations.q.shape[-1]
