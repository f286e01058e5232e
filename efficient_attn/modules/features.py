"""A feature map with the random projection that it keeps."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from efficient_attn.errors import OptionError, UnsupportedError
from efficient_attn.modules.options import one_of, option, whole_number
from efficient_attn.ops.linear.directions import DRAWS, draw_directions
from efficient_attn.ops.linear.features import MAPS
from efficient_attn.ops.linear.inputs import LinearInputs
from efficient_attn.problem import positive_count


@dataclass(frozen=True, kw_only=True)
class RandomFeatureOptions:
    """Options of every backend with random features."""

    num_features: int = option(256, "Outputs of the feature map.")
    projection: str = option("orthogonal", "How the random directions are drawn: orthogonal, simplex or iid.")
    seed: int = option(0, "Seed of the draw; the same seed gives the same features on every device.")

    def __post_init__(self) -> None:
        positive_count("num_features", self.num_features)
        one_of("projection", self.projection, DRAWS)
        whole_number("seed", self.seed)


class FixedFeatures(nn.Module):
    """A feature map with nothing to draw.

    Attributes:
        kind: Name of the feature map in `ops.linear.features.MAPS`.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float) -> LinearInputs:
        """Queries, keys and values as they are."""
        return LinearInputs(q, k, v, key_mask, None, None, self.kind, scale)


def check_even(options: RandomFeatureOptions, why: str) -> None:
    """Refuse an odd number of features of a map that makes two of each direction."""
    size = options.num_features
    if size % 2:
        raise OptionError(f"num_features={size} is odd; {why}: {size - 1} or {size + 1}.")


class Float32Buffers(nn.Module):
    """A module whose buffers follow the model anywhere, but to no dtype narrower than float32.

    Buffers that leave the meta device, where there are no numbers, are made again by `reset_parameters`.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Float32Buffers":
        kept = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, tensor in kept.items():
            moved = getattr(self, name)
            if moved.dtype in (torch.float16, torch.bfloat16):
                setattr(self, name, tensor.to(moved.device))
        if any(x.is_meta and not getattr(self, name).is_meta for name, x in kept.items()):
            self.reset_parameters()
        return self

    def reset_parameters(self) -> None:
        """Make the buffers as they were when the module was built."""
        raise NotImplementedError


class RandomFeatures(Float32Buffers):
    """The random directions of a feature map: part of the model, drawn once, saved with it.

    Attributes:
        kind: Name of the feature map in `ops.linear.features.MAPS`.
        projection: The directions [directions head_dim], shared by all heads; float32 or wider.
    """

    projection: Tensor

    def __init__(self, kind: str, head_dim: int, options: RandomFeatureOptions) -> None:
        super().__init__()
        self.kind = kind
        self._draw = options.projection
        self._shape = (options.num_features // MAPS[kind].per_direction, head_dim)
        self._seed = options.seed
        # The draw is made on the CPU whatever the default device is, and then moved there.
        self.register_buffer("projection", self._directions().to(torch.get_default_device()))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float) -> LinearInputs:
        """Queries, keys and values with the directions that their features take."""
        return LinearInputs(q, k, v, key_mask, self.projection, None, self.kind, scale)

    @torch.no_grad()
    def redraw(self, seed: int) -> None:
        """Put other directions in place of these; states made before are invalid."""
        whole_number("seed", seed)
        if self.projection.is_meta:
            raise UnsupportedError("redraw: the random features lie on meta; load the model first.")
        self._seed = seed
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the directions of the seed again."""
        self.projection.copy_(self._directions())

    def _directions(self) -> Tensor:
        # Rounded to float32 for every model: the same directions in float64 then show rounding alone. Stored
        # row by row, which a rotation is not: torch.export writes other buffers wrongly.
        return draw_directions(self._draw, *self._shape, seed=self._seed).float().contiguous()
