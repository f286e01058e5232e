"""Estimated error of each output row, from second moments of the clusters that are read as summaries.

A summary stands for n keys with one factor m in place of their factors e^δ, δ_j = q·(k_j − k̄). For the weight
p of the cluster its row errs by p |E_c[(e^δ/m − 1)(v − out)]|, at most p √E_c(e^δ/m − 1)² √E_c|v − out|² by
Cauchy–Schwarz. Clusters add as if independent:

    error² ≈ Σ_c p_c² E_c(e^δ/m_c − 1)² E_c|v − out|².

The δ count as n normal scores of variance σ² = Σ_d q_d² var_cd. Their largest is about κσ, κ = √(2 ln n), so
that E_c e^{tδ} is e^{t²σ²/2} up to tσ = κ and grows as e^{tκσ} beyond (Derrida 1981, "Random-energy model: an
exactly solvable model of disordered systems"). Scores are not normal, and entries of keys not uncorrelated:
this is no bound. A bound from the range of the scores of a cluster (Hoeffding's lemma) certifies nothing on
real activations.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.clusters.attention import window_clusters
from efficient_attn.ops.clusters.near import MASKED, Layout, in_order, near_slices
from efficient_attn.ops.clusters.summaries import QueryMoments, Summary, query_moments
from efficient_attn.ops.dtypes import upcast, zero_masked
from efficient_attn.shapes import KeyMask, Keys, Queries, Values


class Scores(NamedTuple):
    """Scores of the keys of each cluster.

    Attributes:
        variance: σ², [… rows clusters].
        mass: Logarithm of the factor m of the summary, [… rows or 1, clusters].
        largest: κ.
    """

    variance: Tensor
    mass: Tensor
    largest: float


def clusters_with_errors(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    scale: float,
    layout: Layout,
    clusters: int,
    steps: int | None,
    key_mask: KeyMask | None,
) -> Tensor:
    """`window_clusters` in float32 or better, and the estimated error of each row in a last column."""
    read = partial(_read_slices, head_dim=q.shape[3])
    q, k, v = _with_moments(q, k, v, key_mask)
    return window_clusters(
        q, k, v, scale=scale, layout=layout, clusters=clusters, steps=steps, key_mask=key_mask, read=read
    )


def _with_moments(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs whose values are followed by |v|² and the squares of the keys, which clusters average too."""
    k, v = (zero_masked(upcast(x), key_mask) for x in (k, v))
    # No output depends on what all keys have in common, but their squares would lose digits to it.
    k = k - k.mean(dim=2, keepdim=True)
    return upcast(q), k, torch.cat([v, v.square().sum(dim=3, keepdim=True), k.square()], dim=3)


def _read_slices(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    real: Tensor,
    summaries: Iterator[Summary],
    layout: Layout,
    *,
    group: int,
    begin: int = 0,
    head_dim: int,
) -> Tensor:
    """`read_slices` of values with moments: the values of each row, and its estimated error."""
    value_dim = v.shape[3] - head_dim - 1
    slices = near_slices(q, k, v[..., :value_dim], real, layout, past=False, begin=begin)
    tilt = query_moments(q.unsqueeze(2), real)
    rows = []
    for some, clusters in zip(slices.split(group), summaries, strict=True):
        near_k, near_v = some.near()
        near = some.rows @ near_k.mT
        queries, means = some.rows[..., :head_dim], clusters.v[..., :value_dim]
        far = queries @ clusters.k.mT + torch.where(clusters.alive, clusters.bias, MASKED).mT
        square, squares = clusters.v[..., value_dim : value_dim + head_dim + 1].split([1, head_dim], dim=4)
        variance = (squares - clusters.k.square()).clamp_min(0).mT
        scores = _scores(queries, variance, tilt, k.shape[2] / clusters.k.shape[3])
        log_weights = torch.cat([near, far], dim=4).log_softmax(dim=4)
        out = log_weights.exp() @ torch.cat([near_v[..., :value_dim], means], dim=3)
        error = error_of_rows(log_weights[..., near.shape[4] :], scores, out, means, square)
        rows.append(torch.cat([out, error], dim=4))
    return in_order(torch.cat(rows, dim=2), q, layout)


def near_scores(rows: Tensor, k: Tensor, visible: Tensor | None) -> Tensor:
    """Scores of the keys of a slice and of the global tokens, of which a row sees all.

    Args:
        visible: Visible keys of the slice for each row of a block, bool [block keys]; None: all.
    """
    scores = rows @ k.mT
    if visible is None:
        return scores
    visible = F.pad(visible, (0, scores.shape[4] - visible.shape[1]), value=True)
    return scores.masked_fill(~visible.repeat(scores.shape[3] // len(visible), 1), MASKED)


def _scores(queries: Tensor, variance: Tensor, tilt: QueryMoments, size: float) -> Scores:
    """Scores of keys that are weighted for the mean query; `variance` [… head_dim clusters]."""
    mean, various = (x.unsqueeze(2) for x in tilt)
    half = various @ variance / 2
    return Scores(
        (queries - mean).square() @ variance, (half + half.square() / 2).log1p(), largest_score(size)
    )


def largest_score(size: int | float) -> float:
    """Expected largest of this many standard normal numbers, to leading order."""
    return math.sqrt(2 * math.log(max(size, 1)))


def error_of_rows(log_weights: Tensor, scores: Scores, out: Tensor, means: Tensor, squares: Tensor) -> Tensor:
    """Estimated errors of rows [… 1].

    Args:
        log_weights: Logarithms of the weights of the summaries, [… rows clusters].
        means, squares: Mean value of each cluster, and the mean of |v|², [… clusters value_dim] and [… 1].
    """
    spread, mass, largest = scores
    deviation = spread.sqrt()
    # Logarithms of E e^{2δ}/m² and E e^δ/m.
    second = 2 * spread - 2 * (deviation - largest / 2).clamp_min(0).square() - 2 * mass
    first = spread / 2 - (deviation - largest).clamp_min(0).square() / 2 - mass
    # p² E(e^δ/m − 1)² without overflow and cancellation, and at most 1: no weight errs by more.
    shares = (2 * log_weights + second).clamp_max(0).exp()
    shares = shares * ((-second).expm1() - 2 * (first - second).expm1()).clamp_min(0)
    distances = squares.mT - 2 * out @ means.mT + out.square().sum(dim=4, keepdim=True)
    return (shares * distances.clamp_min(0)).sum(dim=4, keepdim=True).sqrt()
