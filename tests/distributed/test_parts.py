"""Parts of a sequence on several ranks give the rows, gradients and states of the whole sequence."""

from itertools import chain, product
from threading import BrokenBarrierError

import pytest
import torch
from threads import assert_ranks_are_the_whole, bytes_sent, drawn, join

import efficient_attn as ea
from efficient_attn.conformance.ranks import on_threads
from efficient_attn.distributed.calls import exchange_of, in_force
from efficient_attn.distributed.exchange import all_tokens
from efficient_attn.distributed.layout import KINDS, Layout, local_tokens
from efficient_attn.distributed.neighbours import with_neighbours
from efficient_attn.ops.clusters import closed, probing, slices
from efficient_attn.sharding import at_positions

RANKS, TOKENS = 3, 66
# Blocks of 4 tokens, which end on no boundary of a segment.
CLUSTERS = [
    (False, {"clusters": 6, "global_tokens": 3}),
    (False, {"clusters": 6, "probes": 2}),
    (True, {"clusters": 6, "probes": 2}),
]
CASES = [
    ("exact", True, {}),
    ("exact", False, {}),
    ("window", True, {"window": 12}),
    ("window", False, {"window": 11}),
    ("window", False, {"window": 81}),
    ("linformer", False, {"rank": 6, "max_tokens": 70}),
    ("performer-positive", True, {"num_features": 12}),
    ("performer-positive", False, {"num_features": 12}),
    ("performer-trig", True, {"num_features": 64}),
    ("performer-trig", False, {"num_features": 64}),
    *(("window-clusters", causal, {"window": 8, **options}) for causal, options in CLUSTERS),
]


def of_rank(rank, ranks=RANKS, kind="contiguous"):
    return Layout(None, kind, rank, ranks)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layout_holds_every_position_once_and_knows_its_order(kind):
    layouts = [of_rank(rank, kind=kind) for rank in range(RANKS)]
    x = torch.arange(4 * RANKS)
    positions = [segment for layout in layouts for segment in layout.positions(4)]
    assert sorted(place for segment in positions for place in segment) == x.tolist()
    assert torch.equal(join([local_tokens(x, 0, layout) for layout in layouts], kind, 0), x)
    for layout in layouts:
        local = local_tokens(x, 0, layout)
        assert [local[part].tolist() for part in layout.parts(4)] == [
            x[segment.start : segment.stop].tolist() for segment in layout.positions(4)
        ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masked", ["no", "some", "all"])
@pytest.mark.parametrize(("name", "causal", "options"), CASES)
def test_rows_and_gradients_of_all_ranks_are_those_of_the_whole_sequence(
    name, causal, options, masked, kind, monkeypatch
):
    # One group of blocks for a segment of the layout head-tail, and two for a segment of the other.
    monkeypatch.setattr(closed, "_MOST", 4)
    torch.manual_seed(0)
    backend = ea.build(name, head_dim=8, causal=causal, **options).double()
    tensors, mask = drawn(TOKENS), torch.rand(2, TOKENS) > 0.3
    # The first rank has no real key of one sequence, nor have its first queries, or no rank has any.
    mask[0, : TOKENS if masked == "all" else TOKENS // RANKS + 3] = False
    assert_ranks_are_the_whole(backend, tensors, None if masked == "no" else mask, ranks=RANKS, kind=kind)


@pytest.mark.parametrize(("causal", "options"), CLUSTERS)
def test_a_rank_computes_the_clusters_of_its_own_queries_alone(causal, options, monkeypatch):
    beyond = []

    def near_slices(q, k, v, real, layout, **rest):
        # A part of a block before the first query of a segment.
        beyond.append(q.shape[2] - (layout.block - 1))
        return whole(q, k, v, real, layout, **rest)

    whole = slices.near_slices
    for module in (closed, probing):
        monkeypatch.setattr(module, "near_slices", near_slices)
    backend = ea.build("window-clusters", head_dim=8, causal=causal, window=8, **options).double()
    *qkv, _ = drawn(TOKENS)

    def call(layout):
        exchange_of(backend)(backend, *(local_tokens(x, 2, layout) for x in qkv), None, layout)

    on_threads(RANKS, "contiguous", call)
    assert 0 < sum(beyond) <= TOKENS


@pytest.mark.parametrize(("kind", "reach"), [("contiguous", 5), ("head-tail", 5), ("contiguous", 40)])
def test_a_window_receives_the_keys_that_it_reads_and_no_others(kind, reach):
    tokens = 20
    x = torch.arange(tokens * RANKS, dtype=torch.float64)[None, None, :, None].expand(1, 1, -1, 2)

    def call(layout):
        near = with_neighbours(local_tokens(x, 2, layout), reach, 3, layout)
        return list(zip(layout.positions(tokens), near, strict=True))

    for segment, near in chain(*on_threads(RANKS, kind, call)):
        reached = range(max(segment.start - reach, 0), min(segment.stop + 3, tokens * RANKS))
        assert near[0, 0, :, 0].tolist() == list(reached)


def passes(backend, *tensors, layout):
    """A forward and a backward pass with the tokens of a rank."""
    *inputs, g = (local_tokens(x, 2, layout) for x in tensors)
    inputs = [x.requires_grad_() for x in inputs]
    out = exchange_of(backend)(backend, *inputs, None, layout)
    torch.autograd.grad(out, inputs, g)


@pytest.mark.parametrize(
    ("name", "causal"),
    [("linformer", False), *product(("performer-positive", "window"), (False, True))],
)
def test_bytes_do_not_depend_on_the_length(name, causal):
    options = {"window": {"window": 9}, "linformer": {"rank": 6, "max_tokens": 96}}
    backend = ea.build(name, head_dim=8, causal=causal, **options.get(name, {"num_features": 12})).double()

    def sent(tokens):
        tensors, counts = drawn(tokens), []
        with bytes_sent(counts.append):
            on_threads(RANKS, "contiguous", lambda layout: passes(backend, *tensors, layout=layout))
        return sorted(counts)

    assert sent(48) == sent(96) != []


def test_positions_go_on_from_segment_to_segment():
    x = torch.zeros(1, 8, 2)

    def add(x, start):
        return x + torch.arange(start, start + x.shape[-2])[:, None]

    with in_force(of_rank(0, kind="head-tail")):
        assert at_positions(add, x, 100)[0, :, 0].tolist() == [100, 101, 102, 103, 120, 121, 122, 123]
    assert at_positions(add, x, 100)[0, :, 0].tolist() == list(range(100, 108))


def test_an_error_of_one_rank_of_threads_ends_the_others_and_is_the_one_that_is_raised():
    def call(layout):
        if layout.rank == 1:
            raise ValueError("the second rank")
        all_tokens(torch.zeros(1), 0, layout)

    with pytest.raises(ValueError, match="the second rank"):
        on_threads(RANKS, "contiguous", call)


def test_ranks_of_threads_that_wait_for_a_missing_one_end():
    def call(layout):
        if layout.rank:
            all_tokens(torch.zeros(1), 0, layout)

    with pytest.raises(BrokenBarrierError):
        on_threads(RANKS, "contiguous", call, timeout_s=0.1)
