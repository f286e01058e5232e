"""Feature maps with their random projection."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from efficient_attn.errors import OptionError, UnsupportedError
from efficient_attn.modules.options import one_of, option, whole_number
from efficient_attn.ops.linear.features import DRAWS, MAPS, draw_directions
from efficient_attn.ops.linear.inputs import LinearInputs
from efficient_attn.problem import positive_count


@dataclass(frozen=True, kw_only=True)
class RandomFeatureOptions:
    """Options of all backends with random features."""

    num_features: int = option(256, "Outputs of the feature map.")
    projection: str = option("orthogonal", "How the random directions are drawn: orthogonal, simplex or iid.")
    seed: int = option(0, "Seed of the draw; the same seed gives the same features on every device.")

    def __post_init__(self) -> None:
        positive_count("num_features", self.num_features)
        one_of("projection", self.projection, DRAWS)
        whole_number("seed", self.seed)


class FixedFeatures(nn.Module):
    """Feature map without random directions.

    Attributes:
        kind: Name of the feature map in `ops.linear.features.MAPS`.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float) -> LinearInputs:
        """Inputs without directions."""
        return LinearInputs(q, k, v, key_mask, None, None, self.kind, scale)


def check_even(options: RandomFeatureOptions, why: str) -> None:
    """Refuse an odd number of features for a map with two features per direction."""
    size = options.num_features
    if size % 2:
        raise OptionError(f"num_features={size} is odd; {why}: {size - 1} or {size + 1}.")


class Float32Buffers(nn.Module):
    """Module whose buffers move with the model but stay in float32 or better.

    `reset_parameters` recomputes buffers that leave the meta device, which holds no data.
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
        """Reset the buffers to their initial values."""
        raise NotImplementedError


class RandomFeatures(Float32Buffers):
    """Random directions of a feature map, drawn once and saved with the model.

    Attributes:
        kind: Name of the feature map in `ops.linear.features.MAPS`.
        projection: Directions [directions head_dim], shared by all heads; float32 or better.
    """

    projection: Tensor

    def __init__(self, kind: str, head_dim: int, options: RandomFeatureOptions) -> None:
        super().__init__()
        self.kind = kind
        self._draw = options.projection
        self._shape = (options.num_features // MAPS[kind].per_direction, head_dim)
        self._seed = options.seed
        # Directions are drawn on the CPU, then moved to the default device.
        self.register_buffer("projection", self._directions().to(torch.get_default_device()))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float) -> LinearInputs:
        """Inputs with the random directions."""
        return LinearInputs(q, k, v, key_mask, self.projection, None, self.kind, scale)

    @torch.no_grad()
    def redraw(self, seed: int) -> None:
        """Replace the directions by a new draw; earlier states become invalid."""
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
        # Rounded to float32 for every model, so that a float64 model differs by rounding alone. Contiguous,
        # which a rotation is not, since torch.export writes strided buffers wrongly.
        return draw_directions(self._draw, *self._shape, seed=self._seed).float().contiguous()
