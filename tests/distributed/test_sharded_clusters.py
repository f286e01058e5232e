"""`window-clusters` on the parts of several ranks gives the rows and gradients of the whole sequence."""

from itertools import product

import pytest
import torch
from test_sharded import RANKS
from threads import assert_ranks_are_the_whole, drawn

import efficient_attn as ea
from efficient_attn.conformance.threads import on_threads
from efficient_attn.distributed.calls import exchange_of
from efficient_attn.distributed.layout import KINDS, local_tokens
from efficient_attn.ops.clusters import kmeans, probing, slices

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


CASES = [(*setting, "masked", kind) for setting, kind in product(OPTIONS, KINDS)]
CASES += [(*setting, "unmasked", "contiguous") for setting in OPTIONS]
CASES += [(*setting, "empty", "head-tail") for setting in OPTIONS[1:]]


@pytest.mark.parametrize(("causal", "options", "masked", "kind"), CASES)
def test_rows_and_gradients_of_all_ranks_are_those_of_the_whole_sequence(
    causal, options, masked, kind, monkeypatch
):
    # One group of blocks for a segment of the layout head-tail, and two for a segment of the other.
    monkeypatch.setattr(kmeans, "_MOST", 4)
    backend, mask = built(causal, options), key_masks()[masked]
    assert_ranks_are_the_whole(backend, drawn(TOKENS), mask, ranks=RANKS, kind=kind)


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

    def call(layout):
        return exchange_of(backend).attend(
            backend, *(local_tokens(x, 2, layout) for x in (q, k, v)), None, layout
        )

    on_threads(RANKS, "contiguous", call)
    assert 0 < sum(beyond) <= TOKENS
