"""`window-clusters` on the parts of several ranks gives the rows and gradients of the whole sequence."""

import pytest
import torch
from test_sharded import RANKS, cut, drawn, join
from threads import on_ranks

import efficient_attn as ea
from efficient_attn.ops.sharded.layout import KINDS

# Blocks of 4 tokens, which end on no boundary of a segment.
OPTIONS = [
    (False, {"clusters": 6, "steps": 2}),
    (False, {"clusters": 6, "summary": "segments", "global_tokens": 3}),
    (True, {"clusters": 5, "global_tokens": 3}),
    (False, {"clusters": 6, "probes": 2}),
    (True, {"clusters": 6, "probes": 2}),
    (True, {"clusters": 4, "target_error": 0.2}),
    (False, {"clusters": 4, "target_error": 0.2}),
]
TOKENS = 66


def built(causal, options):
    torch.manual_seed(0)
    backend = ea.build("window-clusters", head_dim=8, num_heads=4, causal=causal, window=8, **options).double()
    if "target_error" in options:
        # One exact head, and one without probes.
        backend.core.use([1, 4, 2, 0])
    return backend


def masks():
    """Real keys: all; none of one sequence on the first rank, whose first queries are padding; none at all."""
    mask = torch.rand(2, TOKENS) > 0.3
    mask[0, : TOKENS // RANKS + 3] = False
    empty = mask.clone()
    empty[0] = False
    return [None, mask, empty]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("causal", "options"), OPTIONS)
def test_rows_and_gradients_of_all_ranks_are_those_of_the_whole_sequence(causal, options, kind, monkeypatch):
    backend = built(causal, options)
    *qkv, g = drawn(TOKENS)
    for mask in masks():
        whole = [x.clone().requires_grad_() for x in qkv]
        wanted = backend(*whole, key_mask=mask)
        wanted.backward(g)

        def call(placed, mask=mask):
            inputs = [cut(x, placed, 2).requires_grad_() for x in qkv]
            own = None if mask is None else cut(mask, placed, 1)
            out = backend.core.forward_sharded(*inputs, own, placed)
            return out.detach(), *torch.autograd.grad(out, inputs, cut(g, placed, 2))

        found = zip(*on_ranks(monkeypatch, RANKS, kind, call), strict=True)
        for x, y in zip([join(one, kind, 2) for one in found], [wanted, *(x.grad for x in whole)], strict=True):
            # Sums of at most 66 terms, each with a few roundings of 1.1e-16.
            assert (x - y).norm() <= 1e-13 * y.norm()
