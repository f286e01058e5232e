"""`window-clusters` on the parts of several ranks gives the rows and gradients of the whole sequence."""

from itertools import product

import pytest
import torch
from test_sharded import RANKS
from threads import drawn, join

import efficient_attn as ea
from efficient_attn.ops.clusters import kmeans, probing, slices
from efficient_attn.ops.sharded.layout import KINDS, own_tokens
from efficient_attn.ops.sharded.threads import on_threads

# Blocks of 4 tokens, which end on no boundary of a segment.
OPTIONS = [
    (False, {"clusters": 6, "steps": 2}),
    (False, {"clusters": 6, "summary": "segments", "global_tokens": 3}),
    (False, {"clusters": 6, "probes": 2}),
    (True, {"clusters": 6, "probes": 2}),
]
TOKENS = 66


def built(causal, options):
    torch.manual_seed(0)
    return ea.build("window-clusters", head_dim=8, num_heads=4, causal=causal, window=8, **options).double()


def key_masks():
    """No mask; no real key of one sequence on the first rank, and queries there; none at all."""
    mask = torch.rand(2, TOKENS) > 0.3
    mask[0, : TOKENS // RANKS + 3] = False
    empty = mask.clone()
    empty[0] = False
    return {"unmasked": None, "masked": mask, "empty": empty}


CASES = [(*one, "masked", kind) for one, kind in product(OPTIONS, KINDS)]
CASES += [(*one, "unmasked", "contiguous") for one in OPTIONS]
CASES += [(*one, "empty", "head-tail") for one in OPTIONS[1:]]


@pytest.mark.parametrize(("causal", "options", "masked", "kind"), CASES)
def test_rows_and_gradients_of_all_ranks_are_those_of_the_whole_sequence(
    causal, options, masked, kind, monkeypatch
):
    # One group of blocks for a segment of the layout head-tail, and two for a segment of the other.
    monkeypatch.setattr(kmeans, "_MOST", 4)
    backend, mask = built(causal, options), key_masks()[masked]
    *qkv, g = drawn(TOKENS)
    whole = [x.clone().requires_grad_() for x in qkv]
    wanted = backend(*whole, key_mask=mask)
    wanted.backward(g)

    def call(placed):
        inputs = [own_tokens(x, 2, placed).requires_grad_() for x in qkv]
        own = None if mask is None else own_tokens(mask, 1, placed)
        out = backend.core.forward_sharded(*inputs, own, placed)
        return out.detach(), *torch.autograd.grad(out, inputs, own_tokens(g, 2, placed))

    found = zip(*on_threads(RANKS, kind, call), strict=True)
    for x, y in zip([join(one, kind, 2) for one in found], [wanted, *(x.grad for x in whole)], strict=True):
        # Sums of at most 66 terms, each with a few roundings of 1.1e-16.
        assert (x - y).norm() <= 1e-13 * y.norm()


@pytest.mark.parametrize(("causal", "options"), OPTIONS)
def test_a_rank_computes_the_blocks_of_its_own_queries_alone(causal, options, monkeypatch):
    beyond = []

    def near_slices(q, k, v, real, layout, **rest):
        # A part of a block before the first query of a segment.
        beyond.append(q.shape[2] - (layout.block - 1))
        return whole(q, k, v, real, layout, **rest)

    whole = slices.near_slices
    for module in (kmeans, probing):
        monkeypatch.setattr(module, "near_slices", near_slices)
    backend, (q, k, v, _) = built(causal, options), drawn(TOKENS)

    def call(placed):
        return backend.core.forward_sharded(*(own_tokens(x, 2, placed) for x in (q, k, v)), None, placed)

    on_threads(RANKS, "contiguous", call)
    assert 0 < sum(beyond) <= TOKENS
