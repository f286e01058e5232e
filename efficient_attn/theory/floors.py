"""Errors of attention weights A that no weights of low rank, or no unbiased ones, can fall below.

Errors are ‖Â − A‖_F / ‖A‖_F of each head, then the root of their mean square over heads.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def weight_spectra(weights: Tensor, *, causal: bool) -> list[Tensor]:
    """Singular values of A / ‖A‖_F in float64, of disjoint blocks of it if causal: [heads values] each.

    Args:
        weights: A, [batch heads q_tokens k_tokens], square if causal.
    """
    wide = weights.detach().cpu().double().flatten(end_dim=1)
    wide = wide / torch.linalg.matrix_norm(wide, keepdim=True)
    return [torch.linalg.svdvals(block) for block in (_visible_blocks(wide) if causal else [wide])]


def mean_head_error(weights: Tensor, exact: Tensor) -> float:
    """The error of weights [batch heads q_tokens k_tokens]."""
    errors, norms = (torch.linalg.matrix_norm(x) for x in (weights - exact, exact))
    return float((errors / norms).square().mean().sqrt())


def rank_floor(spectra: Sequence[Tensor], rank: int) -> float:
    """Lower bound on the error of weights of this rank, before a causal mask if there is one.

    Without a mask its square is Σ_{i>m} σᵢ² (Eckart and Young 1936), and the best weights attain it. A mask
    raises ranks: uniform causal attention, of one feature, has full rank. But a block below the diagonal is
    not masked, and the sum that divides a row only scales it, so the rank of the block is at most m. The sum
    of Σ_{i>m} σᵢ² over disjoint blocks is a lower bound, which need not be attained.
    """
    tails = [values[:, rank:].square().sum(dim=-1) for values in spectra]
    return float(torch.stack(tails).sum(dim=0).mean().sqrt())


def unbiased_error(spectra: Sequence[Tensor], terms: int) -> float:
    """Least expected error of a mean of unbiased independent terms of rank one, without a causal mask.

    For terms X, E‖Â − A‖_F² = (E‖X‖_F² − ‖A‖_F²) / m and E‖X‖_F² = E‖X‖_*² ≥ ‖A‖_*². Singular triplets drawn
    in proportion to σ attain it (after arXiv 2406.18802). It is no floor: weights divided by their own sums,
    dependent terms and terms of rank two can err less.
    """
    (values,) = spectra
    return float(((values.sum(dim=-1).square() - 1) / terms).mean().sqrt())


def _visible_blocks(weights: Tensor) -> Iterator[Tensor]:
    """Disjoint blocks on and below the diagonal, by recursive halving.

    Rows half … end and columns 0 … half are a block, which leaves two triangles.
    """
    half = weights.shape[-1] // 2
    yield weights[:, half:, : half + 1]
    for part in (slice(half), slice(half + 1, None)):
        if weights[:, part].shape[1] > 0:
            yield from _visible_blocks(weights[:, part, part])
