"""Cluster summaries: mass, mean key and mean value in place of the keys of a cluster.

The softmax of a query q over the keys of a cluster needs Σ_j e^{q·k_j} and Σ_j e^{q·k_j} v_j. Around the mean
query m, with weights w_j = e^{m·k_j}, W = Σ w_j and means under these weights, they are to first order
W e^{(q−m)·k̄} and the same times v̄. The second-order term of the mass, ½ (q−m)ᵀΣ(q−m), is averaged over the
queries, whose entries count as uncorrelated: ½ Σ_d s_d Σ_dd.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class QueryMoments(NamedTuple):
    """Mean and variance of a key head's queries, scaled as in the scores.

    Attributes:
        mean: [batch heads 1 head_dim].
        variance: Variance of each entry, [batch heads 1 head_dim].
    """

    mean: Tensor
    variance: Tensor


class Summary(NamedTuple):
    """One key and one value for each cluster, as entries of a softmax.

    Attributes:
        k: Mean keys, [… clusters head_dim].
        v: Mean values, [… clusters value_dim + 1]: an unused padding column matches the keys' bias column and
            avoids a copy.
        bias: Score bias, [… clusters 1]: logarithm of the number of ordinary keys that the cluster replaces.
        alive: Whether the cluster has any key, bool [… clusters 1].
    """

    k: Tensor
    v: Tensor
    bias: Tensor
    alive: Tensor


def query_moments(
    q: Tensor, real: Tensor | None, total: Callable[[Tensor], Tensor] | None = None
) -> QueryMoments:
    """Mean and variance over the real queries of the heads that share summaries.

    Args:
        q: [batch heads group tokens head_dim].
        real: bool [batch tokens]; None: all are.
        total: Sum over the ranks that hold the other queries; None: there are none.
    """
    if real is None and total is None:
        variance, mean = torch.var_mean(q, dim=(2, 3), correction=0)
        return QueryMoments(mean.unsqueeze(2), variance.unsqueeze(2))
    if real is None:
        real = q.new_ones(q.shape[0], q.shape[3], dtype=torch.bool)
    total = total or (lambda x: x)
    # Masking rather than a product with zero, since a padded query may be NaN.
    padding = ~real[:, None, None, :, None]
    count = total((real.sum(dim=-1) * q.shape[2]).to(q.dtype)[:, None, None, None]).clamp_min(1)
    mean = total(q.masked_fill(padding, 0.0).sum(dim=(2, 3)).unsqueeze(2)) / count
    squares = (q - mean.unsqueeze(2)).square().masked_fill(padding, 0.0)
    variance = total(squares.sum(dim=(2, 3)).unsqueeze(2)) / count
    return QueryMoments(mean, variance)


class Members(NamedTuple):
    """Weighted keys, to be summed per cluster and per cell, a stretch of the sequence.

    Attributes:
        rows: w · (k, v, ½ Σ_d s_d k_d², 1), [batch heads tokens head_dim + value_dim + 2].
        chosen: Cluster index of each key, [batch heads tokens].
        top: Largest exponent of each cluster, the reference of its weights, [batch heads clusters].
    """

    rows: Tensor
    chosen: Tensor
    top: Tensor

    def sums(self, cell: Tensor, cells: int) -> Tensor:
        """Sums over the members of each cluster in each cell, [batch heads cells clusters …].

        Args:
            cell: Cell index of each token, [tokens].
        """
        clusters, heads = self.top.shape[-1], self.rows.shape[:2]
        # One `index_add_` over all rows replaces a product.
        head = torch.arange(heads.numel(), device=cell.device).view(*heads, 1)
        place = (head * cells + cell) * clusters + self.chosen
        sums = self.rows.new_zeros(heads.numel() * cells * clusters, self.rows.shape[-1])
        sums.index_add_(0, place.flatten(), self.rows.flatten(0, 2))
        return sums.view(*heads, cells, clusters, -1)

    def part(self, begin: int, end: int) -> "Members":
        """The tokens from `begin` up to `end`."""
        return Members(self.rows[:, :, begin:end], self.chosen[:, :, begin:end], self.top)


def members(
    k: Tensor, v: Tensor, counted: Tensor, chosen: Tensor, queries: QueryMoments, clusters: int
) -> Members:
    """The keys of all clusters, weighted.

    Args:
        k: [batch heads tokens head_dim]; v: [batch heads tokens value_dim].
        counted: Keys that enter the sums, bool [batch tokens].
        chosen: Cluster index of each key, [batch heads tokens].
    """
    # Smaller weights change no sum but would be denormal numbers, which are slow.
    floor = -300.0 if k.dtype == torch.float64 else -42.0
    exponent = (k @ queries.mean.mT).squeeze(-1)
    seen = counted[:, None, :].expand_as(exponent)
    top = exponent.new_full((*exponent.shape[:2], clusters), -torch.inf)
    top = top.scatter_reduce(2, chosen, exponent.detach().masked_fill(~seen, -torch.inf), "amax")
    top = top.masked_fill(top.isinf(), 0.0)
    # Exponents of seen keys are at most 0; the bound lies above, since a clamp's derivative at its bound
    # depends on torch's version.
    weight = (exponent - top.gather(2, chosen)).clamp(floor, 1.0).exp() * seen
    bend = k.square() @ queries.variance.mT / 2
    rows = torch.cat([k, v, bend, torch.ones_like(bend)], dim=-1) * weight[..., None]
    return Members(rows, chosen, top)


def beyond_slices(
    every: Members, *, block: int, back: int, group: int, begin: int, end: int
) -> Iterator[Tensor]:
    """Sums over all members outside the slices of the blocks begin … end − 1, `group` blocks at a time.

    Cells have `block` tokens, the first of them `back` tokens fewer, and the slice of block b is the cells b
    and b + 1. Partial sums are only added, never subtracted, since differences would cancel small terms.

    Yields:
        [batch heads group clusters …].
    """
    tokens = every.rows.shape[2]
    groups = -(-(end - begin) // group)
    first = back - begin * block
    cell = torch.arange(first, first + tokens, device=every.rows.device) // block
    own = torch.arange(group, device=cell.device)[:, None]
    other = torch.arange(group + 2, device=cell.device)
    # A block excludes two cells of the group, whose last cell is the next group's first.
    outside = ((other - own) // 2 != 0).to(every.rows.dtype)
    if groups == 1:
        # Cells that no block leaves out are one.
        parts = every.sums(cell.clamp(-1, group + 1) % (group + 2), group + 2)
        yield (outside @ parts.flatten(3)).unflatten(3, parts.shape[3:])
        return
    # Sums of the first cell of each group, of its other cells, and of all cells beyond.
    beyond = (cell < 0) | (cell > groups * group)
    place = (2 * (cell // group) + (cell % group > 0)).masked_fill(beyond, 2 * groups + 2)
    coarse = every.sums(place, 2 * groups + 3)
    firsts, others = coarse[:, :, :-1:2].unbind(2), coarse[:, :, 1::2].unbind(2)
    both = [first + other for first, other in zip(firsts, others, strict=True)]
    before = list(accumulate(both, initial=coarse[:, :, -1]))
    after = list(accumulate(reversed(both), initial=torch.zeros_like(both[0])))[::-1]
    for number in range(groups):
        low, high = (max((begin + one * group) * block - back, 0) for one in (number, number + 1))
        # The last two cells hold sums that are known already.
        parts = every.part(low, high).sums(cell[low:high] - number * group, group + 2)
        parts[:, :, group] = firsts[number + 1]
        parts[:, :, group + 1] = before[number] + others[number + 1] + after[number + 2]
        some_blocks = min(group, end - begin - number * group)
        yield (outside[:some_blocks] @ parts.flatten(3)).unflatten(3, parts.shape[3:])


def summarise_clusters(sums: Tensor, top: Tensor, queries: QueryMoments, head_dim: int) -> Summary:
    """Summaries of the clusters, from sums over members [batch heads blocks clusters …]."""
    mass = sums[..., -1:]
    alive = mass > 0
    mass = torch.where(alive, mass, 1.0)
    means = sums[..., :-1] / mass
    k = means[..., :head_dim]
    mean, variance = (x.unsqueeze(2).mT for x in queries)
    spread = (means[..., -1:] - k.square() @ variance / 2).clamp_min(0)
    bias = mass.log() + top[:, :, None, :, None] - k @ mean
    return Summary(k, means[..., head_dim:], bias + (spread + spread.square() / 2).log1p(), alive)
