"""Random directions w, one per row, each with the marginal distribution N(0, I)."""

from collections.abc import Callable

import torch
from torch import Generator, Tensor


def iid_directions(num_directions: int, head_dim: int, generator: Generator) -> Tensor:
    """Independent rows of N(0, I), float64 [num_directions head_dim]."""
    return torch.randn(num_directions, head_dim, generator=generator, dtype=torch.float64, device="cpu")


def orthogonal_directions(num_directions: int, head_dim: int, generator: Generator) -> Tensor:
    """Rows orthogonal within blocks of head_dim, with the lengths of Gaussian vectors.

    Choromanski et al. 2021, section 2.4: each block is a uniformly distributed rotation whose rows are
    scaled by independent chi variables, so that every row alone is N(0, I). Blocks are independent.
    """
    blocks = -(-num_directions // head_dim)
    rotations = haar_rotations(blocks, head_dim, generator).flatten(0, 1)[:num_directions]
    lengths = iid_directions(num_directions, head_dim, generator).norm(dim=-1, keepdim=True)
    return rotations * lengths


def simplex_directions(num_directions: int, head_dim: int, generator: Generator) -> Tensor:
    """Rows at angles of cosine −1/(head_dim − 1) within blocks of head_dim, with Gaussian lengths.

    Reid et al. 2023, "Simplex Random Features": each block is a rotated regular simplex, whose rows are
    scaled as in `orthogonal_directions`.
    """
    if head_dim == 1:
        return iid_directions(num_directions, head_dim, generator)
    corners = torch.eye(head_dim, dtype=torch.float64, device="cpu") - 1 / head_dim
    corners /= corners.norm(dim=-1, keepdim=True)
    blocks = -(-num_directions // head_dim)
    rotated = (corners @ haar_rotations(blocks, head_dim, generator)).flatten(0, 1)[:num_directions]
    return rotated * iid_directions(num_directions, head_dim, generator).norm(dim=-1, keepdim=True)


def haar_rotations(blocks: int, dim: int, generator: Generator) -> Tensor:
    """Uniformly distributed orthogonal matrices, float64 [blocks dim dim].

    The Q of a QR decomposition is uniform only once the signs of R's diagonal are moved into it
    (Mezzadri 2007, section 5): without them Q is not isotropic, and positive features are biased.
    """
    gaussian = torch.randn(blocks, dim, dim, generator=generator, dtype=torch.float64, device="cpu")
    rotation, triangle = torch.linalg.qr(gaussian)
    signs = torch.where(triangle.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(rotation)
    return rotation * signs.unsqueeze(-2)


DRAWS: dict[str, Callable[[int, int, Generator], Tensor]] = {
    "orthogonal": orthogonal_directions,
    "simplex": simplex_directions,
    "iid": iid_directions,
}


def draw_directions(kind: str, num_directions: int, head_dim: int, *, seed: int) -> Tensor:
    """Directions of a named distribution; a seed gives the same float64 rows on every device."""
    return DRAWS[kind](num_directions, head_dim, Generator().manual_seed(seed))
