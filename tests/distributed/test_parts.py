"""Parts of a sequence on several ranks give the rows, gradients and states of the whole sequence."""

from itertools import product
from threading import BrokenBarrierError

import pytest
import torch
from threads import assert_ranks_are_the_whole, bytes_sent, drawn

import efficient_attn as ea
from efficient_attn.conformance.ranks import on_threads
from efficient_attn.distributed.calls import exchange_of, in_force
from efficient_attn.distributed.exchange import all_tokens
from efficient_attn.distributed.layout import Layout, local_tokens
from efficient_attn.distributed.neighbours import with_neighbours
from efficient_attn.ops import clusters
from efficient_attn.sharding import at_positions

RANKS, TOKENS, LATER = 3, 66, 5
# Blocks of 4 tokens, which end on no boundary of a segment.
CLUSTERS = {"window": 8, "clusters": 6, "global_tokens": 3}
CASES = [
    ("exact", True, {}),
    ("exact", False, {}),
    ("window", True, {"window": 12}),
    ("window", False, {"window": 81}),
    ("linformer", False, {"rank": 6, "max_tokens": 70}),
    ("performer-positive", True, {"num_features": 12}),
    ("performer-positive", False, {"num_features": 12}),
    ("performer-trig", True, {"num_features": 64}),
    ("window-clusters", False, CLUSTERS),
]

STREAMS = [
    ("exact", {}),
    ("exact-dense", {}),
    # The window ends within the last segment, reaches over a rank, over all, or is the own key alone.
    *(("window", {"window": window}) for window in (8, 40, 81, 1)),
    ("linear-relu", {}),
    ("performer-positive", {"num_features": 12}),
    ("performer-trig", {"num_features": 64}),
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("name", "causal", "options"), CASES)
def test_rows_and_gradients_of_all_ranks_are_those_of_the_whole_sequence(
    name, causal, options, masked, monkeypatch
):
    # Two groups of blocks for the part of a rank.
    monkeypatch.setattr(clusters, "_MOST", 4)
    torch.manual_seed(0)
    backend = ea.build(name, head_dim=8, causal=causal, **options).double()
    tensors, mask = drawn(TOKENS), torch.rand(2, TOKENS) > 0.3
    # No rank has a real key of the first sequence, nor has the first rank of the second, nor its neighbour at
    # its first queries.
    mask[0], mask[1, : TOKENS // RANKS + 3] = False, False
    assert_ranks_are_the_whole(backend, tensors, mask if masked else None, ranks=RANKS)


def test_a_rank_computes_the_clusters_of_its_own_queries_alone(monkeypatch):
    beyond, whole = [], clusters.read_slices

    def read_slices(q, k, v, real, summaries, layout, **rest):
        # A part of a block before the first query of a segment.
        beyond.append(q.shape[2] - (layout.block - 1))
        return whole(q, k, v, real, summaries, layout, **rest)

    monkeypatch.setattr(clusters, "read_slices", read_slices)
    backend = ea.build("window-clusters", head_dim=8, **CLUSTERS).double()
    *qkv, _ = drawn(TOKENS)

    def call(layout):
        exchange_of(backend).attend(backend, *(local_tokens(x, 2, layout) for x in qkv), None, layout)

    on_threads(RANKS, call)
    assert 0 < sum(beyond) <= TOKENS


@pytest.mark.parametrize("reach", [5, 40])
def test_a_window_receives_the_keys_that_it_reads_and_no_others(reach):
    tokens = 20
    x = torch.arange(tokens * RANKS, dtype=torch.float64)[None, None, :, None].expand(1, 1, -1, 2)

    def call(layout):
        return layout.positions(tokens), with_neighbours(local_tokens(x, 2, layout), reach, 3, layout)

    for own, near in on_threads(RANKS, call):
        reached = range(max(own.start - reach, 0), min(own.stop + 3, tokens * RANKS))
        assert near[0, 0, :, 0].tolist() == list(reached)


def close(x, expected):
    # Sums of at most 71 terms, each with a few roundings of 1.1e-16.
    return (x - expected).norm() <= 1e-13 * expected.norm()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("name", "options"), STREAMS)
def test_decoding_and_gradients_go_on_from_a_prefill_on_several_ranks(name, options, masked):
    torch.manual_seed(0)
    backend = ea.build(name, head_dim=8, causal=True, **options).double()
    (q, k, v, _), later = drawn(TOKENS), drawn(LATER)[:3]
    mask = torch.rand(2, TOKENS) > 0.3 if masked else None
    if masked:
        # Ranks without a real key: the last of one sequence, the first of the other.
        mask[0, -(TOKENS // RANKS) :], mask[1, : TOKENS // RANKS] = False, False
    whole = [k.clone().requires_grad_(), v.clone().requires_grad_()]
    out, state = backend.extend(q, *whole, key_mask=mask)
    expected, _ = backend.extend(*later, state)
    gradients = torch.autograd.grad(expected.square().sum(), whole, materialize_grads=True)

    def call(layout):
        inputs = [local_tokens(x, 2, layout).requires_grad_() for x in (q, k, v)]
        real = None if mask is None else local_tokens(mask, 1, layout)
        part, after = exchange_of(backend).prefill(backend, *inputs, real, layout)
        assert close(part, local_tokens(out, 2, layout))
        assert [x.shape for x in after] == [x.shape for x in state]
        steps = []
        for i in range(LATER):
            step, after = backend.extend(*(x[:, :, i : i + 1] for x in later), after)
            steps.append(step)
        decoded = torch.cat(steps, dim=2)
        assert close(decoded, expected)
        # The gradient is that of the sum of the losses of all ranks.
        loss = decoded.square().sum() / RANKS
        return torch.autograd.grad(loss, inputs[1:], materialize_grads=True)

    for x, gradient in zip(zip(*on_threads(RANKS, call), strict=True), gradients, strict=True):
        assert close(torch.cat(x, dim=2), gradient)


def passes(backend, *tensors, layout):
    """A forward and a backward pass with the tokens of a rank."""
    *inputs, g = (local_tokens(x, 2, layout) for x in tensors)
    inputs = [x.requires_grad_() for x in inputs]
    out = exchange_of(backend).attend(backend, *inputs, None, layout)
    torch.autograd.grad(out, inputs, g)


def prefill(backend, *tensors, layout):
    inputs = (local_tokens(x, 2, layout) for x in tensors[:3])
    exchange_of(backend).prefill(backend, *inputs, None, layout)


@pytest.mark.parametrize(
    ("call", "name", "causal"),
    [
        (passes, "linformer", False),
        *((passes, *case) for case in product(("performer-positive", "window"), (False, True))),
        (prefill, "window", True),
    ],
)
def test_bytes_do_not_depend_on_the_length(call, name, causal):
    options = {"window": {"window": 9}, "linformer": {"rank": 6, "max_tokens": 96}}
    backend = ea.build(name, head_dim=8, causal=causal, **options.get(name, {"num_features": 12})).double()

    def sent(tokens):
        tensors, counts = drawn(tokens), []
        with bytes_sent(counts.append):
            on_threads(RANKS, lambda layout: call(backend, *tensors, layout=layout))
        return sorted(counts)

    assert sent(48) == sent(96) != []


def test_positions_go_on_from_rank_to_rank():
    with in_force(Layout(None, 1, RANKS)):
        assert at_positions(lambda x, start: start, torch.zeros(1, 8, 2), 100) == 108


def test_an_error_of_a_rank_of_threads_is_raised_and_a_missing_rank_ends_the_others():
    def call(layout, error):
        if layout.rank == 1 and error:
            raise ValueError("the second rank")
        if layout.rank != 1:
            all_tokens(torch.zeros(1), 0, layout)

    with pytest.raises(ValueError, match="the second rank"):
        on_threads(RANKS, lambda layout: call(layout, True))
    with pytest.raises(BrokenBarrierError):
        on_threads(RANKS, lambda layout: call(layout, False), timeout_s=0.1)
