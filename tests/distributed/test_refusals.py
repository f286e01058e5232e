"""Calls that several ranks cannot answer together are refused, by all of them alike."""

import pickle
from types import SimpleNamespace

import pytest
import torch
from integrations.intercepted import DIM, TOKENS, encoder, written_model

import efficient_attn as ea
from efficient_attn.conformance.threads import on_threads
from efficient_attn.distributed import context_parallel, shard
from efficient_attn.distributed.calls import check_agreeing, check_segments, exchange_of, in_force
from efficient_attn.distributed.layout import Layout
from efficient_attn.errors import ShapeError, UnknownNameError, UnsupportedError
from efficient_attn.integrations.pytorch import replace_attention

RANKS = 3


def of_rank(rank, ranks=RANKS, kind="contiguous"):
    return Layout(None, kind, rank, ranks)


def built(name="exact", **options):
    return ea.build(name, head_dim=8, **options)


def zeros(*tokens):
    return [torch.zeros(1, 2, n, 8) for n in tokens]


def mesh(ndim=1):
    return SimpleNamespace(
        ndim=ndim,
        mesh_dim_names=("dp", "cp"),
        mesh=torch.arange(RANKS),
        get_group=lambda: SimpleNamespace(group_name=""),
        get_local_rank=lambda: 1,
        size=lambda: RANKS,
    )


STATE = built(causal=True).extend(*zeros(8, 8, 8))[1]
X = torch.zeros(1, 8, 16)
LAYER = torch.nn.MultiheadAttention(16, 2)
ea.attach(LAYER, "exact")
ONLY = r"only backend\(q, k, v\) and its extend"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (lambda: ea.Decoder(16, 2, num_layers=1).extend(X, None, X), ONLY),
        (lambda: built(causal=True).extend(*zeros(8, 8, 8), STATE), ONLY),
        (lambda: built().attention_weights(*zeros(8, 8)), ONLY),
        (lambda: built("performer-oprf").calibrate(*zeros(8, 8)), ONLY),
        (lambda: LAYER(*[torch.zeros(4, 1, 16)] * 3, need_weights=True), "model stays exact"),
        (
            lambda: built("window-clusters", causal=True).extend(*zeros(8, 8, 8)),
            "'window-clusters' cannot extend inside context_parallel",
        ),
        (
            lambda: built(lambda q, k, v: v)(*zeros(8, 8, 8)),
            r"cannot read .* other ranks.* exact, .*window-clusters can",
        ),
    ],
)
def test_calls_that_other_ranks_cannot_answer_are_refused(request_, message):
    with in_force(of_rank(0)), pytest.raises(UnsupportedError, match=message):
        request_()


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (
            lambda: shard(torch.zeros(2, 6), mesh(), 0),
            ShapeError,
            r"x has 2 tokens along axis 0, and layout 'contiguous' .* pad it to 3",
        ),
        (
            lambda: shard(torch.zeros(2, 6), mesh(ndim=2), 1),
            ShapeError,
            r"mesh has 2 dimensions .* give mesh\[",
        ),
        (
            lambda: context_parallel(mesh(), layout="zigzag").__enter__(),
            UnknownNameError,
            "zigzag",
        ),
        (
            lambda: check_segments(built(causal=True), *zeros(5, 5), of_rank(1, kind="head-tail")),
            ShapeError,
            "q has 5 tokens on this rank, and layout 'head-tail' has 2 segments",
        ),
        (
            lambda: check_segments(built(causal=True), *zeros(4, 6), of_rank(1, kind="head-tail")),
            UnsupportedError,
            "q has 4 tokens and k has 6",
        ),
        (
            lambda: exchange_of(linformer := built("linformer", max_tokens=20, rank=4)).attend(
                linformer, *zeros(8, 8, 8), None, of_rank(0)
            ),
            ShapeError,
            "at most 20 tokens and k has 24 on all ranks",
        ),
    ],
)
def test_tensors_that_are_no_segments_of_a_layout_are_refused(request_, error, message):
    with pytest.raises(error, match=message):
        request_()


def test_shards_are_copies_of_whole_segments():
    x = torch.arange(12).reshape(2, 6)
    assert shard(x, mesh(), 1).tolist() == [[2, 3], [8, 9]]
    assert shard(x, mesh(), 1, "head-tail").tolist() == [[1, 4], [7, 10]]


@torch.no_grad()
def test_calls_that_stay_exact_in_a_model_are_refused():
    model, run = written_model()
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
    first = replace_attention(model, "exact", only="layers.0.*")
    torch.testing.assert_close(model(x), out)
    copied = pickle.loads(pickle.dumps(model))
    for layer in (model.layers[1], copied.layers[1]):
        with in_force(of_rank(0)), pytest.raises(UnsupportedError, match=r"layers.1.self_attn stays exact"):
            layer(x)
    second = replace_attention(model, "window", window=5, only="layers.1.*")
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


def rescaled(rank):
    return built(scale=0.5 if rank else 0.25)


def redrawn(rank):
    backend = built("performer-positive", num_features=12)
    backend.redraw(rank)
    return backend


def calibrated(rank):
    backend = built("performer-oprf", num_features=12)
    torch.manual_seed(rank)
    backend.calibrate(*torch.randn(2, 1, 2, 16, 8))
    return backend


def trained(rank):
    backend = built("linformer", max_tokens=64, rank=4)
    with torch.no_grad():
        backend.core.mix_keys[..., :2] += rank
    return backend


@pytest.mark.parametrize(
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
def test_all_ranks_refuse_backends_that_differ(build, error, message):
    # Draws of a seed are those of the process, not of a thread.
    alike, differing = [build(0) for _ in range(RANKS)], [build(rank) for rank in range(RANKS)]

    def call(layout):
        check_agreeing(alike[layout.rank], *zeros(8, 8, 8), None, layout)
        with pytest.raises(error, match=message):
            check_agreeing(differing[layout.rank], *zeros(8, 8, 8), None, layout)

    on_threads(RANKS, "contiguous", call)


def test_all_ranks_refuse_calls_that_differ_with_the_message_of_the_first_that_does():
    backend = built()

    def call(layout):
        check_agreeing(backend, *zeros(8, 8, 8), None, layout)
        with pytest.raises(ShapeError) as error:
            check_agreeing(backend, *zeros(8 - layout.rank // 2, 8, 8), None, layout)
        return str(error.value)

    (message,) = set(on_threads(RANKS, "contiguous", call))
    assert message.startswith("Rank 2 of the mesh calls exact")
    assert "q float32 [1, 2, 7, 8]" in message.partition(", and rank 0 calls exact")[0]


def test_a_backend_that_changes_on_one_rank_after_a_call_is_refused_too():
    backends = [redrawn(0) for _ in range(RANKS)]

    def call(layout):
        backend = backends[layout.rank]
        check_agreeing(backend, *zeros(8, 8, 8), None, layout)
        with torch.inference_mode():
            backend.redraw(layout.rank)
        with pytest.raises(UnsupportedError, match="Rank 1 of the mesh has other"):
            check_agreeing(backend, *zeros(8, 8, 8), None, layout)
        backend.load_state_dict(backends[0].state_dict() if layout.rank else backend.state_dict())
        check_agreeing(backend, *zeros(8, 8, 8), None, layout)

    on_threads(RANKS, "contiguous", call)
