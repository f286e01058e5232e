"""A KV cache grows in place where nobody can notice: memory, masks, and states that share a buffer."""

import copy
import pickle
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import efficient_attn as ea

HEADS, HEAD_DIM, WINDOW = 2, 8, 5
GLOBAL = "window with global tokens"
SIZES = {
    "window": {"window": WINDOW},
    GLOBAL: {"window": 3, "global_tokens": 2},
    "window-clusters": {"clusters": 4, "window": 4},
}


def built(name: str) -> ea.Backend:
    return ea.build(name.split()[0], head_dim=HEAD_DIM, causal=True, **SIZES.get(name, {})).double()


def inputs(tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, HEADS, tokens, HEAD_DIM)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]


CACHED = {"exact", "exact-dense", "window-clusters"}


@pytest.mark.parametrize("name", sorted(CACHED))
def test_a_step_copies_no_past_token_while_there_is_room(name):
    backend, given = built(name), inputs(66)
    _, state = backend.extend(*(x[:, :, :1] for x in given))
    places = []
    for token in range(1, 66):
        _, state = backend.extend(*(x[:, :, token : token + 1] for x in given), state)
        places.append((state.k.untyped_storage().data_ptr(), state.v.untyped_storage().data_ptr()))
    moves = [token for token, (one, other) in enumerate(pairwise(places), start=2) if one != other]
    # Room for 2 tokens at first, and for twice as many whenever it is full.
    assert moves == [2, 4, 8, 16, 32, 64]
    assert torch.equal(state.k, given[1]) and torch.equal(state.v, given[2])


def test_the_buffer_of_a_window_is_at_most_twice_as_large_as_the_window():
    backend, given = built("window"), inputs(30)
    _, state = backend.extend(*(x[:, :, :20] for x in given))
    for start, stop in pairwise([20, 21, 22, 23, 24, 30]):
        _, state = backend.extend(*(x[:, :, start:stop] for x in given), state)
        assert torch.equal(state.k, given[1][:, :, stop - WINDOW + 1 : stop])
        assert state.k.untyped_storage().nbytes() <= 2 * state.k.nbytes


def duplicated(state):
    return copy.deepcopy(state)


def reordered(state):
    return type(state)(*(x.index_select(0, torch.tensor([0, 1])) for x in state))


def cut(state):
    return state._replace(k=state.k[:, :, :-1], v=state.v[:, :, :-1], key_mask=state.key_mask[:, :-1])


def first_entry(state):
    return type(state)(*(x[:1] for x in state))


def pickled(state):
    return pickle.loads(pickle.dumps(state))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("change", [duplicated, reordered, cut, first_entry, pickled])
@pytest.mark.parametrize("name", [*sorted(CACHED), "window", GLOBAL])
def test_a_changed_state_never_writes_to_the_state_that_it_was_made_of(name, change, masked):
    backend, given = built(name), inputs(10)
    mask = torch.arange(10)[None].expand(2, -1) % 5 != 1 if masked else None

    def extended(state, start, stop, batch=2):
        some = None if mask is None else mask[:batch, start:stop]
        return backend.extend(*(x[:batch, :, start:stop] for x in given), state, key_mask=some)

    state = None
    for start, stop in pairwise([0, 3, 4, 5]):
        _, state = extended(state, start, stop)
    other = change(state)
    wanted, later = extended(state, 5, 6)
    kept = [x.clone() for x in later]
    extended(other, 9, 10, batch=len(other.k))
    assert all(torch.equal(x, y) for x, y in zip(later, kept, strict=True))
    if change not in (cut, first_entry):
        # A changed state may have a mask of its own, with which global keys are read in another order.
        assert (extended(other, 5, 6)[0] - wanted).abs().max() <= 1e-12


@pytest.mark.parametrize("masks", ["..m", "m..", ".m.", "mmm"])
@pytest.mark.parametrize("name", [*sorted(CACHED), "window"])
def test_calls_with_and_without_a_mask_may_follow_each_other(name, masks):
    backend, given = built(name), inputs(9)
    mask = torch.ones(2, 9, dtype=torch.bool)
    outs, state = [], None
    for number, kind in enumerate(masks):
        part = slice(3 * number, 3 * number + 3)
        if kind == "m":
            mask[:, part] = torch.tensor([[False, True, False], [True, False, True]])
            for x in given[1:]:
                x[:, :, part].masked_fill_(~mask[:, None, part, None], torch.nan)
        some = mask[:, part].clone() if kind == "m" else None
        out, state = backend.extend(*(x[:, :, part] for x in given), state, key_mask=some)
        outs.append(out)
    assert torch.equal(state.key_mask, mask[:, -state.key_mask.shape[1] :])
    wanted = backend(*given, key_mask=mask)
    assert (torch.cat(outs, dim=2) - wanted).abs().max() <= 1e-12


@pytest.mark.parametrize("name", [*sorted(CACHED), "window", GLOBAL])
def test_gradients_of_queries_survive_a_step_that_appends_in_place(name):
    backend, (q, k, v) = built(name), inputs(12)
    state, outs, leaf = None, [], q.clone().requires_grad_()
    for start, stop in pairwise([0, 5, 6, 7, 8]):
        out, state = backend.extend(*(x[:, :, start:stop] for x in (leaf, k, v)), state)
        outs.append(out)
    with torch.no_grad():
        backend.extend(*(x[:, :, 8:9] for x in (q, k, v)), state)
    (found,) = torch.autograd.grad(torch.cat(outs, dim=2).square().sum(), leaf)
    (wanted,) = torch.autograd.grad(backend(leaf, k, v)[:, :, :8].square().sum(), leaf)
    assert (found - wanted).abs().max() <= 1e-12


@pytest.mark.parametrize("name", [*sorted(CACHED), "window", GLOBAL])
def test_a_state_of_inference_mode_is_extended_outside_it(name):
    backend, given = built(name), inputs(8)

    def steps(modes):
        outs, state = [], None
        for mode, (start, stop) in zip(modes, pairwise([0, 3, 4, 5, 6]), strict=True):
            with mode():
                out, state = backend.extend(*(x[:, :, start:stop] for x in given), state)
            outs.append(out)
        return torch.cat(outs, dim=2)

    inside, outside = torch.inference_mode, torch.no_grad
    wanted = steps([outside] * 4)
    for modes in ([inside] * 4, [inside, inside, inside, outside], [outside, outside, inside, outside]):
        assert torch.equal(steps(modes), wanted)


@pytest.mark.parametrize("name", [*sorted(CACHED), "window", GLOBAL])
def test_a_state_of_another_batch_is_refused(name):
    backend, given = built(name), inputs(6)
    state = None
    for start, stop in pairwise([0, 3, 4]):
        _, state = backend.extend(*(x[:, :, start:stop] for x in given), state)
    with pytest.raises(RuntimeError, match=r"[Ss]izes of tensors must match"):
        backend.extend(*(x[:1, :, 4:5] for x in given), state)
