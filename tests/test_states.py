"""A state owns its memory: what callers do to their tensors afterwards changes no later output."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import efficient_attn as ea

STREAMING = [name for name in ea.list_backends() if ea.spec(name).capabilities.streaming]
HEADS, HEAD_DIM, TOKENS = 2, 8, 24
SIZES = {"window": {"window": 5}, "window-clusters": {"clusters": 4, "window": 4}}


def built(name: str, kv_heads: int = HEADS) -> ea.Backend:
    size = ea.spec(name).size_option
    options = SIZES.get(name, {} if size is None else {size: 6})
    backend = ea.build(name, head_dim=HEAD_DIM, causal=True, **options).double()
    if backend.needs_calibration:
        backend.calibrate(*inputs(TOKENS, seed=1, kv_heads=kv_heads)[:2])
    return backend


def inputs(tokens: int, *, seed: int = 0, kv_heads: int = HEADS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2, heads, tokens, HEAD_DIM, generator=generator, dtype=torch.float64)
        for heads in (HEADS, kv_heads, kv_heads)
    ]


@pytest.mark.parametrize("name", STREAMING)
def test_an_expanded_key_and_value_are_kept_as_they_were(name):
    backend, (q, k, v) = built(name), inputs(TOKENS)
    one_k, one_v = k[:, :1].clone(), v[:, :1].clone()
    _, state = backend.extend(q, one_k.expand_as(k), one_v.expand_as(v))
    one_k.fill_(torch.nan), one_v.fill_(torch.nan)
    _, wanted = backend.extend(q, k[:, :1].repeat(1, HEADS, 1, 1), v[:, :1].repeat(1, HEADS, 1, 1))
    step = [x[:, :, -1:] for x in (q, k, v)]
    torch.testing.assert_close(
        backend.extend(*step, state)[0], backend.extend(*step, wanted)[0], rtol=0, atol=0
    )


@pytest.mark.parametrize("name", STREAMING)
def test_a_state_keeps_none_of_the_callers_memory_alive(name):
    backend = built(name)
    packed = torch.stack(inputs(TOKENS), dim=3)
    q, k, v = packed.unbind(dim=3)
    _, state = backend.extend(q, k, v)
    _, later = backend.extend(q, k, v, state)
    _, same = backend.extend(*(x[:, :, :0] for x in (q, k, v)), state)
    theirs = packed.untyped_storage().data_ptr()
    for one in (state, later, same):
        for kept in one:
            assert kept.untyped_storage().data_ptr() != theirs
            # Nothing but what the state is made of is held, and spare capacity for as much again.
            assert kept.untyped_storage().nbytes() <= 2 * kept.numel() * kept.element_size()


# Of the last state only, a buffer has spare capacity, for one more call.
@pytest.mark.parametrize("bounds", [[0, 9], [0, 8, 9], [0, 5, 6]])
@pytest.mark.parametrize("name", STREAMING)
@torch.no_grad()
def test_a_state_is_extended_twice_without_one_continuation_knowing_the_other(name, bounds):
    backend, (q, k, v) = built(name), inputs(TOKENS)
    parts = (slice(9, 12), slice(12, 16))
    one, other = ([x[:, :, part] for x in (q, k, v)] for part in parts)
    state = None
    for start, stop in pairwise(bounds):
        _, state = backend.extend(*(x[:, :, start:stop] for x in (q, k, v)), state)
    before = [x.clone() for x in state]
    wanted, branch = backend.extend(*one, state)
    kept = [x.clone() for x in branch]
    alone, _ = backend.extend(*other, copy.deepcopy(state))
    assert torch.equal(backend.extend(*other, state)[0], alone)
    backend.extend(*other, branch)
    assert torch.equal(backend.extend(*one, state)[0], wanted)
    assert all(torch.equal(x, y) for x, y in zip([*state, *branch], [*before, *kept], strict=True))


@pytest.mark.parametrize("name", STREAMING)
def test_gradients_through_states_are_those_of_one_call(name):
    backend, given = built(name), inputs(TOKENS)

    def gradients(bounds: list[int]) -> list[Tensor]:
        leaves, state, found = [x.clone().requires_grad_() for x in given], None, []
        for start, stop in pairwise(bounds):
            out, state = backend.extend(*(x[:, :, start:stop] for x in leaves), state)
            found.append(out)
        return list(torch.autograd.grad(torch.cat(found, dim=2).square().sum(), leaves))

    for got, wanted in zip(gradients([0, 9, 9, 10, TOKENS]), gradients([0, TOKENS]), strict=True):
        # Signed sums may nearly cancel, and gradients divide by their squares: relative to the largest.
        assert (got - wanted).abs().max() <= 1e-11 * wanted.abs().max()
