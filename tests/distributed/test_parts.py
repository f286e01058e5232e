"""Parts of a sequence on several ranks give the rows, gradients and states of the whole sequence."""

from itertools import chain, product
from threading import BrokenBarrierError

import pytest
import torch
from thread_ranks import bytes_sent, drawn

import efficient_attn as ea
from efficient_attn.conformance.ranks import on_threads
from efficient_attn.distributed.calls import exchange_of, in_force
from efficient_attn.distributed.exchange import all_tokens
from efficient_attn.distributed.layout import KINDS, Layout, local_tokens
from efficient_attn.distributed.neighbours import with_neighbours
from efficient_attn.ops import clusters
from efficient_attn.sharding import at_positions

RANKS, TOKENS, LATER = 3, 66, 5
# Blocks of 4 tokens, which end on no boundary of a segment.
CLUSTERS = {"window": 8, "clusters": 6}

# Of these a rank sends as many bytes whatever the length.
FIXED = [("linformer", False), *product(("performer-positive", "window"), (False, True))]
STREAMS = [
    ("exact", {}),
    ("exact-dense", {}),
    # The window ends within the last segment, reaches over a rank, over all, or is the own key alone.
    *(("window", {"window": window}) for window in (8, 40, 81, 1)),
    ("linear-relu", {}),
    ("performer-positive", {"num_features": 12}),
    ("performer-trig", {"num_features": 64}),
]


@pytest.mark.parametrize(("name", "options"), [("window-clusters", CLUSTERS), ("window", {"window": 81})])
def test_parts_of_several_groups_and_windows_over_several_ranks_are_the_whole(name, options, monkeypatch):
    monkeypatch.setattr(clusters, "MOST_BLOCKS", 4)
    ea.check(ea.build(name, head_dim=4, **options), only=["parts_on_several_ranks_are_the_whole"])


def test_a_rank_computes_the_clusters_of_its_own_queries_alone(monkeypatch):
    beyond, whole = [], clusters.read_slices

    def read_slices(q, span, members, sums, blocks, block, scale):
        # Parts of a block before the first query of a segment and after the last.
        beyond.append(len(blocks) * block - 2 * (block - 1))
        return whole(q, span, members, sums, blocks, block, scale)

    monkeypatch.setattr(clusters, "read_slices", read_slices)
    backend = ea.build("window-clusters", head_dim=8, **CLUSTERS).double()
    *qkv, _ = drawn(TOKENS)

    def call(layout):
        exchange_of(backend).attend(backend, *(local_tokens(x, 2, layout) for x in qkv), None, layout)

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


def close(x, expected):
    # Sums of at most 71 terms, each with a few roundings of 1.1e-16.
    return (x - expected).norm() <= 1e-13 * expected.norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("name", "options"), STREAMS)
def test_decoding_goes_on_from_a_prefill_on_several_ranks(name, options, masked, kind):
    torch.manual_seed(0)
    backend = ea.build(name, head_dim=8, causal=True, **options).double()
    qkv, later = drawn(TOKENS)[:3], drawn(LATER)[:3]
    mask = torch.rand(2, TOKENS) > 0.3 if masked else None
    if masked:
        # Ranks without a real key: the last of one sequence, the first of the other.
        mask[0, -(TOKENS // RANKS) :], mask[1, : TOKENS // RANKS] = False, False
    out, state = backend.extend(*qkv, key_mask=mask)
    expected, _ = backend.extend(*later, state)

    def call(layout):
        inputs = [local_tokens(x, 2, layout) for x in qkv]
        real = None if mask is None else local_tokens(mask, 1, layout)
        part, after = exchange_of(backend).prefill(backend, *inputs, real, layout)
        return part, after, local_tokens(out, 2, layout)

    for part, after, rows in on_threads(RANKS, kind, call):
        assert close(part, rows)
        assert [x.shape for x in after] == [x.shape for x in state]
        steps = []
        for i in range(LATER):
            step, after = backend.extend(*(x[:, :, i : i + 1] for x in later), after)
            steps.append(step)
        assert close(torch.cat(steps, dim=2), expected)


@pytest.mark.parametrize(("name", "options"), STREAMS)
def test_gradients_pass_through_the_state_of_all_ranks(name, options):
    torch.manual_seed(0)
    backend = ea.build(name, head_dim=8, causal=True, **options).double()
    (q, k, v, _), later = drawn(TOKENS), drawn(1)[:3]
    whole = [k.clone().requires_grad_(), v.clone().requires_grad_()]
    out, _ = backend.extend(*later, backend.extend(q, *whole)[1])
    expected = torch.autograd.grad(out.square().sum(), whole, materialize_grads=True)

    def call(layout):
        inputs = [local_tokens(x, 2, layout).requires_grad_() for x in (q, k, v)]
        _, state = exchange_of(backend).prefill(backend, *inputs, None, layout)
        # Every rank decodes the token; the gradient is that of the sum of their losses.
        out, _ = backend.extend(*later, state)
        return torch.autograd.grad(out.square().sum() / RANKS, inputs[1:], materialize_grads=True)

    parts = zip(*on_threads(RANKS, "contiguous", call), strict=True)
    for x, whole_grad in zip(parts, expected, strict=True):
        assert close(torch.cat(x, dim=2), whole_grad)


def passes(backend, *tensors, layout):
    """A forward and a backward pass with the tokens of a rank, and a prefill where causal."""
    *inputs, g = (local_tokens(x, 2, layout) for x in tensors)
    inputs = [x.requires_grad_() for x in inputs]
    exchange = exchange_of(backend)
    torch.autograd.grad(exchange.attend(backend, *inputs, None, layout), inputs, g)
    if backend.problem.causal:
        exchange.prefill(backend, *inputs, None, layout)


@pytest.mark.parametrize(("name", "causal"), FIXED)
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

    with in_force(Layout(None, "head-tail", 0, RANKS)):
        assert at_positions(add, x, 100)[0, :, 0].tolist() == [100, 101, 102, 103, 120, 121, 122, 123]
    assert at_positions(add, x, 100)[0, :, 0].tolist() == list(range(100, 108))


def test_an_error_of_one_rank_of_threads_ends_the_others_and_is_the_one_that_is_raised():
    def call(layout):
        if layout.rank == 1:
            raise ValueError("the second rank")
        all_tokens(torch.zeros(1), 0, layout)

    with pytest.raises(ValueError, match="the second rank"):
        on_threads(RANKS, "contiguous", call)


def test_ranks_of_threads_that_wait_for_a_missing_one_end(monkeypatch):
    monkeypatch.setattr("efficient_attn.conformance.ranks.TIMEOUT_S", 0.1)

    def call(layout):
        if layout.rank:
            all_tokens(torch.zeros(1), 0, layout)

    with pytest.raises(BrokenBarrierError):
        on_threads(RANKS, "contiguous", call)
