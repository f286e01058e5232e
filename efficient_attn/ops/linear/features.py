"""Feature maps whose inner products estimate exp(x·y), maps of other kernels, and random directions.

The interface to linear attention is one value: features with a separate logarithmic scale,
feature = values · exp(log_scale). Each map has a pullback, so that a backward pass can recompute
the features of a chunk instead of storing the features of all tokens. Each direction w has the marginal
distribution N(0, I), or the fixed norm √head_dim.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from efficient_attn.shapes import Directions, Vectors

# Offset of every feature of Performer-ReLU, so that no sum of them vanishes.
RELU_OFFSET = 1e-3


class Features(NamedTuple):
    """Features of queries or keys, values · exp(log_scale).

    Attributes:
        log_scale: [… tokens features]; [… tokens 1] for a map with values.
        values: [… tokens features]; None: all ones.
    """

    log_scale: Tensor
    values: Tensor | None


class FeatureMap(NamedTuple):
    """Feature map and its pullback.

    Attributes:
        features: Function of (x, directions) that returns the features of x.
        pullback: Function of (x, features, gradients with respect to log_scale and values, directions)
            that returns the gradient with respect to x.
        signed: Whether features are values of any sign with one common scale for a token.
        per_direction: Number of features per direction; 0 for a map without directions.
        exponential: Whether features are exp(w·x − |x|²/2 + constant), with w the directions or, for two
            features per direction, the directions and then their opposites.
        trigonometric: Whether the features are the cosines, then the sines, of w·x, times
            exp(|x|²/2 + constant).
        fixed: Number of features of a map without directions, as a function of head_dim.
        unscaled: Whether features are positive values, 0 for masked tokens, and every scale is 1.
        plain: Name of the map with the same features as values of scale 1, which overflow and underflow.
    """

    features: Callable[[Tensor, Any], Features]
    pullback: Callable[[Tensor, Features, Features, Any], Tensor]
    signed: bool = False
    per_direction: int = 0
    exponential: bool = False
    trigonometric: bool = False
    fixed: Callable[[int], int] | None = None
    unscaled: bool = False
    plain: str = ""

    @property
    def has_values(self) -> bool:
        """Whether features are values, and not each the exponential of its own scale."""
        return self.signed or self.unscaled

    def num_features(self, directions: int, head_dim: int) -> int:
        return self.fixed(head_dim) if self.fixed else self.per_direction * directions


def half_square(x: Vectors) -> Tensor:
    """|x|²/2, [… tokens 1]."""
    return x.square().sum(dim=-1, keepdim=True) / 2


def positive_features(x: Vectors, directions: Directions) -> Features:
    """exp(w·x − |x|²/2) / √m for each of m directions w (Choromanski et al. 2021, eq. 5)."""
    return Features(x @ directions.mT - (half_square(x) + math.log(directions.shape[-2]) / 2), None)


def _positive_pullback(x: Tensor, features: Features, grad: Features, directions: Tensor) -> Tensor:
    return grad.log_scale @ directions - x * grad.log_scale.sum(dim=-1, keepdim=True)


def hyperbolic_features(x: Vectors, directions: Directions) -> Features:
    """exp(−|x|²/2) / √2m · [exp(w·x), exp(−w·x)] for m directions w (Choromanski et al. 2021, lemma 1)."""
    products = x @ directions.mT
    constant = half_square(x) + math.log(2 * directions.shape[-2]) / 2
    return Features(torch.cat([products - constant, -products - constant], dim=-1), None)


def _hyperbolic_pullback(x: Tensor, features: Features, grad: Features, directions: Tensor) -> Tensor:
    grad_plus, grad_minus = grad.log_scale.chunk(2, dim=-1)
    return (grad_plus - grad_minus) @ directions - x * grad.log_scale.sum(dim=-1, keepdim=True)


def trigonometric_features(x: Vectors, directions: Directions) -> Features:
    """exp(|x|²/2) / √m · [cos(w·x), sin(w·x)] for each of m directions w (Choromanski et al. 2021, eq. 4)."""
    angles = x @ directions.mT
    values = torch.cat([angles.cos(), angles.sin()], dim=-1).div_(math.sqrt(directions.shape[-2]))
    return Features(half_square(x), values)


def _trigonometric_pullback(x: Tensor, features: Features, grad: Features, directions: Tensor) -> Tensor:
    assert features.values is not None and grad.values is not None
    cos, sin = features.values.chunk(2, dim=-1)
    grad_cos, grad_sin = grad.values.chunk(2, dim=-1)
    return (cos * grad_sin - sin * grad_cos) @ directions + x * grad.log_scale


def relu_features(x: Vectors, directions: Directions) -> Features:
    """max(w·x, 0) / √m + 0.001 for each of m directions w (Choromanski et al. 2021, Performer-ReLU)."""
    values = (x @ directions.mT).relu() / math.sqrt(directions.shape[-2]) + RELU_OFFSET
    return Features(x.new_zeros(*x.shape[:-1], 1), values)


def _relu_pullback(x: Tensor, features: Features, grad: Features, directions: Tensor) -> Tensor:
    assert features.values is not None and grad.values is not None
    slope = (features.values > RELU_OFFSET).to(x) / math.sqrt(directions.shape[-2])
    return (grad.values * slope) @ directions


def elu_features(x: Vectors, directions: None = None) -> Features:
    """elu(x) + 1, entry by entry: 1 + x above zero, exp(x) below (Katharopoulos et al. 2020, eq. 7)."""
    # No clamp, whose derivative at 0 depends on torch's version. One of the two terms is 0.
    above = x.relu()
    return Features(above.log1p() + (x - above), None)


def _elu_pullback(x: Tensor, features: Features, grad: Features, directions: None) -> Tensor:
    return grad.log_scale / (1 + x.relu())


def plain_elu_features(x: Vectors, directions: None = None) -> Features:
    """elu(x) + 1 as values: zero for x below −104 in float32."""
    above = x.relu()
    # PyTorch computes powers of two four times as fast as powers of e.
    return Features(x.new_zeros(*x.shape[:-1], 1), (x - above).mul_(math.log2(math.e)).exp2_().add_(above))


def _plain_elu_pullback(x: Tensor, features: Features, grad: Features, directions: None) -> Tensor:
    assert features.values is not None and grad.values is not None
    # The derivative is 1 above zero, and the feature below.
    return grad.values * features.values.clamp_max(1.0)


def exponential_features(x: Vectors, directions: None = None) -> Features:
    """exp(x), entry by entry, of logarithms that another map has computed."""
    return Features(x, None)


def _exponential_pullback(x: Tensor, features: Features, grad: Features, directions: None) -> Tensor:
    return grad.log_scale


def plain_exponential_features(x: Vectors, directions: None = None) -> Features:
    """exp(x) as values."""
    return Features(x.new_zeros(*x.shape[:-1], 1), x.mul(math.log2(math.e)).exp2_())


def _plain_exponential_pullback(x: Tensor, features: Features, grad: Features, directions: None) -> Tensor:
    assert features.values is not None and grad.values is not None
    return grad.values * features.values


def taylor_features(x: Vectors, directions: None = None, *, order: int) -> Features:
    """[1, x], and for order 2 also x_i²/√2 and x_i x_j for i < j.

    Products are the first terms of the exponential: 1 + x·y, which may be negative, or 1 + x·y + (x·y)²/2,
    which is at least 1/2.
    """
    scale = _finite_scale(x, power=order)
    values = [torch.ones_like(scale), x]
    if order == 2:
        row, column, factor = _pairs(x)
        values.append(factor * x[..., row] * x[..., column])
    return Features(scale, torch.cat(values, dim=-1) * (-scale).exp())


def _taylor_pullback(
    x: Tensor, features: Features, grad: Features, directions: None, *, order: int
) -> Tensor:
    assert grad.values is not None
    grads = grad.values * (-_finite_scale(x, power=order)).exp()
    grad_x, grad_pairs = grads[..., 1:].tensor_split([x.shape[-1]], dim=-1)
    if order == 1:
        return grad_x
    row, column, factor = _pairs(x)
    weighted = factor * grad_pairs
    grad_x = grad_x.index_add(-1, row, weighted * x[..., column])
    return grad_x.index_add(-1, column, weighted * x[..., row])


def _pairs(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Indices i ≤ j of every pair of entries, and the factor of its product."""
    row, column = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
    return row, column, 1 - (row == column).to(x) * (1 - math.sqrt(0.5))


def _finite_scale(x: Tensor, *, power: int) -> Tensor:
    """Logarithm of the largest entry's power, at least 0, which keeps products in range, [… tokens 1].

    The scale is divided out and multiplied back, so that no gradient flows through it.
    """
    return power * x.detach().abs().amax(dim=-1, keepdim=True).clamp_min(1.0).log()


def _taylor_map(order: int, fixed: Callable[[int], int]) -> FeatureMap:
    features, pullback = partial(taylor_features, order=order), partial(_taylor_pullback, order=order)
    return FeatureMap(features, pullback, signed=True, fixed=fixed)


MAPS = {
    "positive": FeatureMap(positive_features, _positive_pullback, per_direction=1, exponential=True),
    "hyperbolic": FeatureMap(hyperbolic_features, _hyperbolic_pullback, per_direction=2, exponential=True),
    "trigonometric": FeatureMap(
        trigonometric_features,
        _trigonometric_pullback,
        signed=True,
        per_direction=2,
        trigonometric=True,
    ),
    "relu": FeatureMap(relu_features, _relu_pullback, per_direction=1, unscaled=True),
    "elu": FeatureMap(elu_features, _elu_pullback, fixed=lambda d: d, plain="plain-elu"),
    "plain-elu": FeatureMap(plain_elu_features, _plain_elu_pullback, fixed=lambda d: d, unscaled=True),
    "exponential": FeatureMap(
        exponential_features,
        _exponential_pullback,
        fixed=lambda d: d,
        plain="plain-exponential",
    ),
    "plain-exponential": FeatureMap(
        plain_exponential_features,
        _plain_exponential_pullback,
        fixed=lambda d: d,
        unscaled=True,
    ),
    "taylor-1": _taylor_map(1, lambda d: 1 + d),
    "taylor-2": _taylor_map(2, lambda d: (d + 1) * (d + 2) // 2),
}


def softmax_map(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """log [softmax(Wx + b), softmax(−Wx − b)], [… tokens 2·features] (Zhang et al. 2024, eq. 6)."""
    projected = x @ weight.mT + bias
    return torch.cat([projected.log_softmax(dim=-1), (-projected).log_softmax(dim=-1)], dim=-1)


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


# Norms of directions: of a Gaussian vector, or √head_dim.
NORMS = ("chi", "fixed")


def draw_directions(
    kind: str, num_directions: int, head_dim: int, *, seed: int, norms: str = "chi"
) -> Tensor:
    """Directions of a named distribution. A seed gives the same float64 rows on every device.

    Fixed norms are the regularised kernel of Choromanski et al. (2021), section 2.4: less variance, a bias.
    """
    rows = DRAWS[kind](num_directions, head_dim, Generator().manual_seed(seed))
    if norms == "chi":
        return rows
    return rows * (math.sqrt(head_dim) / rows.norm(dim=-1, keepdim=True))
