"""Position encodings: sinusoidal ones are added to embeddings, rotary ones rotate q and k.

Rotary positions work with every backend, since they change q and k before the backend.
"""

import torch
from torch import Tensor

from efficient_attn.errors import OptionError
from efficient_attn.ops.dtypes import float64_device, upcast

KINDS = ("sinusoidal", "rotary")

# Longest wavelength over 2π (Vaswani et al. 2017, section 3.5; Su et al. 2021, section 3.2.2).
BASE = 10_000.0


def position_angles(start: int, tokens: int, dim: int, device: torch.device, base: float = BASE) -> Tensor:
    """pos · base^(−2i/dim) for pos from `start` on, float64 [tokens dim/2] on `float64_device(device)`."""
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


def rotate(x: Tensor, start: int, *, base: float = BASE) -> Tensor:
    """Queries or keys [… tokens head_dim] with pair (i, i + head_dim/2) rotated by its angle.

    The product q·k then depends on the difference of the positions alone (Su et al. 2021, RoFormer, eq. 16).
    """
    angles = position_angles(start, x.shape[-2], x.shape[-1], x.device, base)
    first, second = upcast(x).chunk(2, dim=-1)
    cosines, sines = angles.cos().to(first), angles.sin().to(first)
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return turned.to(x.dtype)


def check_even(name: str, dim: int, kind: str) -> None:
    """Refuse an odd size for positions with pairs of entries."""
    if dim % 2:
        raise OptionError(
            f"{name}={dim} is odd, and {kind} positions come in pairs: {name}={dim - 1} or {dim + 1}."
        )
