"""Position encodings: sinusoidal and learned (added to embeddings), and rotary (rotate q and k).

Rotary positions work with every backend, since they change q and k before the backend.
"""

import torch
from torch import Tensor, nn

from efficient_attn.errors import OptionError, ShapeError
from efficient_attn.ops.dtypes import float64_device, upcast

KINDS = ("sinusoidal", "learned", "rotary")

# Longest wavelength over 2π (Vaswani et al. 2017, section 3.5; Su et al. 2021, section 3.2.2).
BASE = 10_000.0
# Standard deviation of a learned position before training (Devlin et al. 2019 and their code).
_LEARNED_STD = 0.02


def position_angles(start: int, tokens: int, dim: int, device: torch.device, base: float = BASE) -> Tensor:
    """Angles pos · base^(−2i/dim), pos ≥ `start`, float64 [tokens dim/2] on `float64_device(device)`."""
    device = float64_device(device)
    # Rounding pos · frequency to float32 would cause an error of 2e-4 radians at position 4096.
    frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
    positions = torch.arange(start, start + tokens, dtype=torch.float64, device=device)
    return positions[:, None] * frequencies


def add_sinusoidal_positions(x: Tensor, start: int) -> Tensor:
    """x [batch tokens model_dim] plus PE(pos, 2i) = sin, PE(pos, 2i+1) = cos of the angles, pos from `start`.

    PE(pos + k) is PE(pos) with each pair rotated by k · 10000^(−2i/dim) (Vaswani et al. 2017, section 3.5).
    """
    angles = position_angles(start, x.shape[-2], x.shape[-1], x.device)
    return x + torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).to(x)


def rotate(x: Tensor, start: int, *, base: float = BASE, scaling: float = 1.0) -> Tensor:
    """Queries or keys [… tokens head_dim] with pair (i, i + head_dim/2) rotated by its angle / scaling.

    The product q·k then depends on the difference of the positions alone (Su et al. 2021, RoFormer, eq. 16).
    A scaling of s interpolates positions: s times the trained length has the angles of the trained length
    (Chen et al. 2023, eq. 4).
    """
    angles = position_angles(start, x.shape[-2], x.shape[-1], x.device, base) / scaling
    first, second = upcast(x).chunk(2, dim=-1)
    cosines, sines = angles.cos().to(first), angles.sin().to(first)
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return turned.to(x.dtype)


class LearnedPositions(nn.Module):
    """x plus a learned vector of `table` [max_tokens model_dim] for each position."""

    def __init__(self, model_dim: int, max_tokens: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(max_tokens, model_dim))
        nn.init.normal_(self.table, std=_LEARNED_STD)

    def forward(self, x: Tensor, start: int) -> Tensor:
        """x [batch tokens model_dim], whose first token has position `start`."""
        end = start + x.shape[-2]
        if end > len(self.table):
            raise ShapeError(
                f"x reaches {end} tokens and there are {len(self.table)} learned positions. "
                f"Build the stack with max_tokens={end} or more, or with other positions."
            )
        return x + self.table[start:end]


def check_even(name: str, dim: int, kind: str) -> None:
    """Refuse an odd size for positions with pairs of entries."""
    if dim % 2:
        raise OptionError(
            f"{name}={dim} is odd, and {kind} positions come in pairs: {name}={dim - 1} or {dim + 1}."
        )
