"""Calls that several ranks cannot answer together are refused, by all of them alike."""

from types import SimpleNamespace

import pytest
import torch
from intercepted_models import DIM, TOKENS, written_model

import efficient_attn as ea
from efficient_attn.conformance.ranks import on_threads
from efficient_attn.distributed import context_parallel, shard
from efficient_attn.distributed.calls import check_agreeing, check_segments, exchange_of, in_force
from efficient_attn.distributed.layout import Layout
from efficient_attn.errors import ShapeError, UnknownNameError, UnsupportedError

RANKS = 3


def of_rank(rank, ranks=RANKS, kind="contiguous"):
    return Layout(None, kind, rank, ranks)


def built(name="exact", **options):
    return ea.build(name, head_dim=8, **options)


def zeros(*tokens):
    return [torch.zeros(1, 2, n, 8) for n in tokens]


def mesh(ndim=1):
    group, names = SimpleNamespace(group_name=""), ("dp", "cp")
    methods = {"get_group": lambda: group, "get_local_rank": lambda: 1, "size": lambda: RANKS}
    return SimpleNamespace(ndim=ndim, mesh_dim_names=names, **methods)


def check_tokens(queries, keys):
    check_segments(built(causal=True), *zeros(queries, keys), of_rank(1, kind="head-tail"))


def attend_to_too_many(*, max_tokens):
    backend = built("linformer", max_tokens=max_tokens, rank=4)
    exchange_of(backend).attend(backend, *QKV, None, of_rank(0))


QKV, X, PAIR = zeros(8, 8, 8), torch.zeros(1, 8, 16), torch.zeros(2, 6)
STATE = built(causal=True).extend(*QKV)[1]
ONLY = r"only backend\(q, k, v\) and its extend"
REFUSED = [
    (lambda: ea.Decoder(16, 2, num_layers=1).extend(X, None, X), UnsupportedError, ONLY),
    (lambda: built(causal=True).extend(*QKV, STATE), UnsupportedError, ONLY),
    (lambda: built().attention_weights(*QKV[:2]), UnsupportedError, ONLY),
    (lambda: built("performer-oprf").calibrate(*QKV[:2]), UnsupportedError, ONLY),
    (lambda: built(lambda q, k, v: v)(*QKV), UnsupportedError, r"cannot read .* other ranks.*exact, .* can"),
    (lambda: shard(PAIR, mesh(), 0), ShapeError, "x has 2 tokens along axis 0, .*'contiguous'.* pad it to 3"),
    (lambda: shard(PAIR, mesh(ndim=2), 1), ShapeError, r"mesh has 2 dimensions .* give mesh\["),
    (lambda: context_parallel(mesh(), layout="zigzag").__enter__(), UnknownNameError, "zigzag"),
    (lambda: check_tokens(5, 5), ShapeError, "q has 5 tokens on this rank, .*'head-tail' has 2 segments"),
    (lambda: check_tokens(4, 6), UnsupportedError, "q has 4 tokens and k has 6"),
    (lambda: attend_to_too_many(max_tokens=20), ShapeError, "at most 20 tokens and k has 24 on all ranks"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_several_ranks_cannot_answer_is_refused(call, error, message):
    with in_force(of_rank(0)), pytest.raises(error, match=message):
        call()


@torch.no_grad()
def test_models_of_other_libraries_are_refused_replaced_or_captured():
    """Their positions and masks would be of the tokens of one process."""
    model, run = written_model()
    replaced = ea.intercept.replace(model, {"layers.1": "exact"}, example=run)
    for block in (replaced, ea.intercept.capture(model)):
        with block, in_force(of_rank(0)), pytest.raises(UnsupportedError, match=ONLY):
            run()
    assert run().shape == (2, TOKENS, DIM)


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("q float32 [1, 2, 7, 8]", {"q": zeros(7)[0]}),
        ("q float64", {"q": zeros(8)[0].double()}),
        ("that needs a gradient", {"q": zeros(8)[0].requires_grad_()}),
        ("key_mask bool", {"key_mask": torch.ones(1, 8, dtype=torch.bool)}),
        ("exact(dropout=0.0, compute_dtype=None, kernel=default), causal", {"backend": built(causal=True)}),
        ("scale 0.5,", {"backend": built(scale=0.5)}),
    ],
)
def test_all_ranks_refuse_a_call_that_differs_with_one_message(words, changes):
    q, k, v = zeros(8, 8, 8)
    alike = {"backend": built(), "q": q, "k": k, "v": v, "key_mask": None}

    def call(layout):
        check_agreeing(**alike, layout=layout)
        with pytest.raises(ShapeError) as error:
            check_agreeing(**(alike | changes if layout.rank == RANKS - 1 else alike), layout=layout)
        return str(error.value)

    (message,) = set(on_threads(RANKS, "contiguous", call))
    assert message.startswith("Rank 2 of the mesh calls exact")
    assert words in message.partition(", and rank 0 calls exact")[0]


def redraw(backend, rank):
    with torch.inference_mode():
        backend.redraw(rank)


def train(backend, rank):
    with torch.no_grad():
        backend.core.mix_keys[..., :2] += rank


@pytest.mark.parametrize(
    ("change", "name", "options"),
    [
        (redraw, "performer-positive", {"num_features": 12}),
        (train, "linformer", {"max_tokens": 64, "rank": 4}),
    ],
)
def test_a_backend_that_changes_on_one_rank_after_calls_is_refused_until_all_are_alike(change, name, options):
    backends = [built(name, **options) for _ in range(RANKS)]

    def call(layout):
        backend = backends[layout.rank]
        check_agreeing(backend, *zeros(8, 8, 8), None, layout)
        change(backend, layout.rank)
        with pytest.raises(UnsupportedError, match="Rank 1 of the mesh has other parameters, random feat"):
            check_agreeing(backend, *zeros(8, 8, 8), None, layout)
        backend.load_state_dict(backends[0].state_dict() if layout.rank else backend.state_dict())
        check_agreeing(backend, *zeros(8, 8, 8), None, layout)

    on_threads(RANKS, "contiguous", call)
