"""Parts of a sequence on several ranks give the rows and gradients of the whole sequence."""

import pickle
from itertools import chain, product
from threading import BrokenBarrierError
from types import SimpleNamespace

import pytest
import torch
from integrations.intercepted import DIM, TOKENS, encoder
from integrations.intercepted import written_model as own_model
from threads import assert_ranks_are_the_whole, bytes_sent, drawn, join

import efficient_attn as ea
from efficient_attn.conformance.threads import on_threads
from efficient_attn.distributed import context_parallel, shard
from efficient_attn.distributed.calls import check_agreeing, check_segments, exchange_of, in_force
from efficient_attn.distributed.exchange import all_tokens
from efficient_attn.distributed.layout import KINDS, Layout, local_tokens
from efficient_attn.distributed.neighbours import with_neighbours
from efficient_attn.errors import ShapeError, UnknownNameError, UnsupportedError
from efficient_attn.sharding import at_positions

RANKS = 3
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
@pytest.mark.parametrize(("name", "causal", "options"), CASES)
def test_rows_and_gradients_of_all_ranks_are_those_of_the_whole_sequence(name, causal, options, kind):
    torch.manual_seed(0)
    tokens = 66
    backend = ea.build(name, head_dim=8, causal=causal, **options).double()
    tensors, mask = drawn(tokens), torch.rand(2, tokens) > 0.3
    # The first rank has no real key of one sequence, nor have its first queries.
    mask[0, : tokens // RANKS + 3] = False
    assert_ranks_are_the_whole(backend, tensors, mask, ranks=RANKS, kind=kind)


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


@pytest.mark.parametrize(
    ("name", "causal"),
    [("linformer", False), *product(("performer-positive", "performer-trig", "window"), (False, True))],
)
def test_bytes_do_not_depend_on_the_length(name, causal):
    options = {"window": {"window": 9}, "linformer": {"rank": 6, "max_tokens": 96}}
    backend = ea.build(name, head_dim=8, causal=causal, **options.get(name, {"num_features": 12})).double()

    def sent(tokens):
        *qkv, g = drawn(tokens)

        def call(layout):
            inputs = [local_tokens(x, 2, layout).requires_grad_() for x in qkv]
            out = exchange_of(backend).attend(backend, *inputs, None, layout)
            torch.autograd.grad(out, inputs, local_tokens(g, 2, layout))

        counts = []
        with bytes_sent(counts.append):
            on_threads(RANKS, "contiguous", call)
        return sorted(counts)

    assert sent(48) == sent(96) != []


def test_positions_go_on_from_segment_to_segment():
    x = torch.zeros(1, 8, 2)

    def add(x, start):
        return x + torch.arange(start, start + x.shape[-2])[:, None]

    with in_force(of_rank(0, kind="head-tail")):
        assert at_positions(add, x, 100)[0, :, 0].tolist() == [100, 101, 102, 103, 120, 121, 122, 123]
    assert at_positions(add, x, 100)[0, :, 0].tolist() == list(range(100, 108))


def test_calls_that_other_ranks_cannot_answer_are_refused():
    q = torch.randn(1, 2, 8, 8)
    backend = ea.build("exact", head_dim=8, causal=True)
    _, state = backend.extend(q, q, q)
    decoder, x = ea.Decoder(16, 2, num_layers=1), torch.randn(1, 8, 16)
    calls = [
        lambda: decoder.extend(x, None, x),
        lambda: backend.extend(q, q, q, state),
        lambda: backend.attention_weights(q, q),
        lambda: ea.build("performer-oprf", head_dim=8).calibrate(q, q),
        lambda: ea.MultiheadAttention(16, 2)(*[torch.randn(4, 1, 16)] * 3, need_weights=True),
    ]
    with in_force(of_rank(0)):
        for call in calls:
            with pytest.raises(UnsupportedError, match=r"only backend\(q, k, v\) and its extend"):
                call()
        with pytest.raises(UnsupportedError, match="'window-clusters' cannot extend inside context_parallel"):
            ea.build("window-clusters", head_dim=8, causal=True).extend(q, q, q)
        with pytest.raises(
            UnsupportedError, match=r"cannot read .* other ranks.* exact, .*window-clusters can"
        ):
            ea.build(lambda q, k, v: v, head_dim=8)(q, q, q)
    assert backend(q, q, q).shape == q.shape


@torch.no_grad()
def test_calls_that_stay_exact_in_a_model_are_refused():
    model, run = own_model()
    layer, x, pairs = model.layers[0], torch.randn(1, TOKENS, DIM), torch.ones(TOKENS, TOKENS).bool()
    with (
        ea.intercept.replace(model, "exact", only="layers.0", example=run),
        in_force(of_rank(0, ranks=1)),
        pytest.raises(UnsupportedError, match=r"layers.1 stays exact, .* of this process alone: no pattern"),
    ):
        model.layers[1](x)
    with ea.intercept.replace(model, "window", window=5, example=run):
        out = layer(x, pairs)
        with (
            in_force(of_rank(0)),
            pytest.raises(UnsupportedError, match=r"layers.0 stays exact.*: .*\. Serve it by a backend"),
        ):
            layer(x, pairs)
        assert torch.equal(layer(x, pairs), out)
    for block in (ea.intercept.measure(model), ea.intercept.capture(model)):
        with (
            in_force(of_rank(0)),
            block,
            pytest.raises(UnsupportedError, match=r"layers.0 stays exact, .*: ea.intercept"),
        ):
            run()
    assert run().shape == (2, TOKENS, DIM)


@torch.no_grad()
@pytest.mark.parametrize("training", [False, True])
def test_torchs_layers_outside_of_a_replacement_are_refused(training):
    """In evaluation torch's encoder layer computes attention without the forward of its attention."""
    model, x = encoder().train(training), torch.randn(2, TOKENS, DIM)
    names, out = [*vars(model.layers[1])], model(x)
    first = ea.replace_attention(model, "exact", only="layers.0.*")
    torch.testing.assert_close(model(x), out)
    copied = pickle.loads(pickle.dumps(model))
    for layer in (model.layers[1], copied.layers[1]):
        with in_force(of_rank(0)), pytest.raises(UnsupportedError, match=r"layers.1.self_attn stays exact"):
            layer(x)
    second = ea.replace_attention(model, "window", window=5, only="layers.1.*")
    served = model(x)

    def alone(layout):
        with torch.no_grad(), in_force(layout):
            return model(x)

    torch.testing.assert_close(on_threads(1, "contiguous", alone)[0], served)
    second.undo()
    first.undo()
    assert [*vars(model.layers[1])] == names
    with in_force(of_rank(0)):
        assert torch.equal(model(x), out)


def mesh(ndim=1):
    return SimpleNamespace(
        ndim=ndim,
        mesh_dim_names=("dp", "cp"),
        mesh=torch.arange(RANKS),
        get_group=lambda: SimpleNamespace(group_name=""),
        get_local_rank=lambda: 1,
        size=lambda: RANKS,
    )


def test_shards_are_copies_of_whole_segments_and_other_requests_are_refused():
    x = torch.arange(12).reshape(2, 6)
    assert shard(x, mesh(), 1).tolist() == [[2, 3], [8, 9]]
    assert shard(x, mesh(), 1, "head-tail").tolist() == [[1, 4], [7, 10]]
    with pytest.raises(
        ShapeError, match=r"x has 2 tokens along axis 0, and layout 'contiguous' .* pad it to 3"
    ):
        shard(x, mesh(), 0)
    with pytest.raises(ShapeError, match=r"mesh has 2 dimensions .* give mesh\["):
        shard(x, mesh(ndim=2), 1)
    with pytest.raises(UnknownNameError, match="zigzag"), context_parallel(mesh(), layout="zigzag"):
        pass
    segments = of_rank(1, kind="head-tail")
    q, backend = torch.randn(1, 2, 5, 4), ea.build("exact", head_dim=4, causal=True)
    with pytest.raises(
        ShapeError, match="q has 5 tokens on this rank, and layout 'head-tail' has 2 segments"
    ):
        check_segments(backend, q, q, segments)
    with pytest.raises(UnsupportedError, match="q has 4 tokens and k has 6"):
        check_segments(backend, q[:, :, :4], torch.randn(1, 2, 6, 4), segments)


def test_all_ranks_refuse_calls_that_differ_with_the_message_of_the_first_that_does():
    backend, q = ea.build("exact", head_dim=8), torch.randn(1, 2, 8, 8)

    def call(layout):
        check_agreeing(backend, q, q, q, None, layout)
        with pytest.raises(ShapeError) as error:
            check_agreeing(backend, q[:, :, layout.rank // 2 :], q, q, None, layout)
        return str(error.value)

    (message,) = set(on_threads(RANKS, "contiguous", call))
    assert message.startswith("Rank 2 of the mesh calls exact")
    assert "q float32 [1, 2, 7, 8]" in message.partition(", and rank 0 calls exact")[0]


def rescaled(rank):
    return ea.build("exact", head_dim=8, scale=0.5 if rank else 0.25)


def redrawn(rank):
    backend = ea.build("performer-positive", head_dim=8, num_features=12)
    backend.redraw(rank)
    return backend


def calibrated(rank):
    backend = ea.build("performer-oprf", head_dim=8, num_features=12)
    torch.manual_seed(rank)
    backend.calibrate(*torch.randn(2, 1, 2, 16, 8))
    return backend


def trained(rank):
    backend = ea.build("linformer", head_dim=8, max_tokens=64, rank=4)
    with torch.no_grad():
        backend.core.mix_keys[..., :2] += rank
    return backend


DIFFERING = pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            rescaled,
            ShapeError,
            r"Rank 1 of the mesh calls exact.* scale 0\.5,.* rank 0 calls exact.* scale 0\.25,",
        ),
        (
            redrawn,
            UnsupportedError,
            "Rank 1 of the mesh has other parameters, random features or calibration",
        ),
        (calibrated, UnsupportedError, "Rank 1 of the mesh has other .* performer-oprf.*: build, redraw and"),
        (trained, UnsupportedError, "Rank 1 of the mesh has other .* linformer.*, or load one state dict"),
    ],
)


@DIFFERING
def test_all_ranks_refuse_backends_that_differ(build, error, message):
    q = torch.randn(1, 2, 8, 8)
    # Draws of a seed are those of the process, not of a thread.
    alike, differing = [build(0) for _ in range(RANKS)], [build(rank) for rank in range(RANKS)]

    def call(layout):
        check_agreeing(alike[layout.rank], q, q, q, None, layout)
        with pytest.raises(error, match=message):
            check_agreeing(differing[layout.rank], q, q, q, None, layout)

    on_threads(RANKS, "contiguous", call)


def test_a_backend_that_changes_on_one_rank_after_a_call_is_refused_too():
    q, backends = torch.randn(1, 2, 8, 8), [redrawn(0) for _ in range(RANKS)]

    def call(layout):
        backend = backends[layout.rank]
        check_agreeing(backend, q, q, q, None, layout)
        with torch.inference_mode():
            backend.redraw(layout.rank)
        with pytest.raises(UnsupportedError, match="Rank 1 of the mesh has other"):
            check_agreeing(backend, q, q, q, None, layout)
        backend.load_state_dict(backends[0].state_dict() if layout.rank else backend.state_dict())
        check_agreeing(backend, q, q, q, None, layout)

    on_threads(RANKS, "contiguous", call)


def test_relative_positions_and_longer_sequences_than_a_projection_are_refused():
    q = torch.randn(1, 2, 8, 8)
    for name in ("exact", "window"):
        backend = ea.build(name, head_dim=8, num_heads=2, max_distance=4)
        with pytest.raises(UnsupportedError, match="no backend has relative positions"):
            check_segments(backend, q, q, of_rank(0))
    backend = ea.build("linformer", head_dim=8, max_tokens=20, rank=4)
    with pytest.raises(ShapeError, match="at most 20 tokens and k has 24 on all ranks"):
        exchange_of(backend).attend(backend, q, q, q, None, of_rank(0))


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
