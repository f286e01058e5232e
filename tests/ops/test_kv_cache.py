"""States own their memory, and a KV cache grows in place: buffers, masks, and changed states."""

import pickle
from itertools import pairwise

import pytest
import torch
from reference import random_qkv
from small_backends import small_backend
from torch import Tensor

import efficient_attn as ea
from efficient_attn.measure.memory import tensors_in
from efficient_attn.ops.softmax.kv_cache import append

STREAMING = [name for name in ea.list_backends() if ea.spec(name).capabilities.streaming]
GLOBAL = "window with global tokens"
SIZES = {"window": {"window": 5}, GLOBAL: {"window": 3, "global_tokens": 2}}
ALL = pytest.mark.parametrize("name", ["exact", "exact-dense", "window", GLOBAL])


def built(name: str) -> ea.Backend:
    return small_backend(name.split()[0], 6, head_dim=8, causal=True, **SIZES.get(name, {}))


def inputs(tokens: int) -> list[Tensor]:
    return list(random_qkv(2, 2, 2, tokens, tokens, 8, 8))


def extended(backend, tokens, cuts, state=None, mask=None):
    """Output of the calls between the cuts, and the state after them."""
    outs = []
    for start, stop in pairwise(cuts):
        key_mask = None if mask is None else mask[:, start:stop]
        out, state = backend.extend(*(x[:, :, start:stop] for x in tokens), state, key_mask=key_mask)
        outs.append(out)
    return torch.cat(outs, dim=2), state


@pytest.mark.parametrize("name", STREAMING)
def test_a_state_keeps_none_of_the_callers_memory_alive(name):
    backend = built(name)
    packed = torch.stack(inputs(200), dim=3)
    q, k, v = packed.unbind(dim=3)
    _, state = backend.extend(q, k, v)
    _, later = backend.extend(q, k, v, state)
    _, same = backend.extend(*(x[:, :, :0] for x in (q, k, v)), state)
    for x in tensors_in((state, later, same)):
        assert x.untyped_storage().data_ptr() != packed.untyped_storage().data_ptr()
        # Nothing but the state itself takes memory, and spare capacity for as much again.
        assert x.untyped_storage().nbytes() <= 2 * x.numel() * x.element_size()


def test_a_step_copies_no_past_token_while_there_is_room():
    backend, tokens = built("exact"), inputs(66)
    _, state = extended(backend, tokens, [0, 1])
    addresses = []
    for token in range(1, 66):
        _, state = extended(backend, tokens, [token, token + 1], state)
        addresses.append((state.k.untyped_storage().data_ptr(), state.v.untyped_storage().data_ptr()))
    moves = [token for token, (before, after) in enumerate(pairwise(addresses), start=2) if before != after]
    # Room for 2 tokens at first, and for twice as many whenever it is full.
    assert moves == [2, 4, 8, 16, 32, 64]
    assert torch.equal(state.k, tokens[1]) and torch.equal(state.v, tokens[2])


def test_a_long_cache_takes_15_percent_more_memory_at_most_and_copies_eight_tokens_a_step_on_average():
    x, copied = torch.arange(2048.0)[:, None], 0
    for token in range(2048, 4096):
        before, x = x, append(x, torch.full((1, 1), float(token)))
        copied += len(before) * (x.data_ptr() != before.data_ptr())
        assert x.untyped_storage().nbytes() <= 1.15 * x.nbytes
    assert torch.equal(x[:, 0], torch.arange(4096.0))
    # Of 2048 steps, the first and another five copy everything.
    assert copied <= 8.5 * 2048


def test_a_row_of_a_buffer_that_is_repeated_is_copied():
    new = torch.zeros(2, 1, 1)
    first = append(torch.arange(8.0).reshape(2, 4, 1), new)[:1].expand(2, 5, 1)
    assert torch.equal(append(first, new), torch.cat([first, new], dim=1))


# One token or one sequence less, or the same tokens elsewhere in memory.
CHANGES = {
    "cut": lambda x: x._replace(k=x.k[:, :, :-1], v=x.v[:, :, :-1], key_mask=x.key_mask[:, :-1]),
    "first entry": lambda x: type(x)(*(part[:1] for part in x)),
    "reordered": lambda x: type(x)(*(part.index_select(0, torch.tensor([0, 1])) for part in x)),
    "pickled": lambda x: pickle.loads(pickle.dumps(x)),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@ALL
def test_a_changed_state_never_writes_to_the_state_that_it_was_made_of(name, change, masked):
    backend, tokens = built(name), inputs(10)
    mask = torch.arange(10)[None].expand(2, -1) % 5 != 1 if masked else None
    # The buffers of seven tokens have room for more.
    _, state = extended(backend, tokens, [0, 3, 4, 5, 6, 7], mask=mask)
    changed = CHANGES[change](state)
    expected, later = extended(backend, tokens, [7, 8], state, mask)
    before = [x.clone() for x in later]
    batch = len(changed.k)
    part, of_part = [x[:batch] for x in tokens], None if mask is None else mask[:batch]
    out, _ = extended(backend, part, [9, 10], changed, of_part)
    assert all(map(torch.equal, later, before))
    # It reads its own tokens, wherever it lies; a cut state with global tokens is none.
    if name != GLOBAL:
        copied = type(changed)(*(x.clone() for x in changed))
        assert (extended(backend, part, [9, 10], copied, of_part)[0] - out).abs().max() <= 1e-12
    if change in ("reordered", "pickled"):
        # A changed state may have a mask of its own, with which global keys are read in another order.
        assert (extended(backend, tokens, [7, 8], changed, mask)[0] - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("masks", ["..m", ".m."])
@ALL
def test_calls_with_and_without_a_mask_may_follow_each_other(name, masks):
    backend, tokens = built(name), inputs(9)
    mask, outs, state = torch.ones(2, 9, dtype=torch.bool), [], None
    for number, kind in enumerate(masks):
        part = slice(3 * number, 3 * number + 3)
        if kind == "m":
            mask[:, part] = torch.tensor([[False, True, False], [True, False, True]])
            for x in tokens[1:]:
                x[:, :, part].masked_fill_(~mask[:, None, part, None], torch.nan)
        key_mask = mask[:, part].clone() if kind == "m" else None
        out, state = backend.extend(*(x[:, :, part] for x in tokens), state, key_mask=key_mask)
        outs.append(out)
    expected = backend(*tokens, key_mask=mask)
    assert (torch.cat(outs, dim=2) - expected).abs().max() <= 1e-12


@ALL
def test_gradients_of_queries_survive_a_step_that_appends_in_place(name):
    backend, (q, k, v) = built(name), inputs(12)
    leaf = q.clone().requires_grad_()
    out, state = extended(backend, (leaf, k, v), [0, 5, 6, 7, 8])
    with torch.no_grad():
        extended(backend, (q, k, v), [8, 9], state)
    (actual,) = torch.autograd.grad(out.square().sum(), leaf)
    (expected,) = torch.autograd.grad(backend(leaf, k, v)[:, :, :8].square().sum(), leaf)
    assert (actual - expected).abs().max() <= 1e-12


@ALL
def test_a_state_of_inference_mode_is_extended_outside_it(name):
    backend, tokens = built(name), inputs(8)

    def steps(modes):
        outs, state = [], None
        for mode, cuts in zip(modes, pairwise([0, 3, 4, 5, 6]), strict=True):
            with mode():
                out, state = extended(backend, tokens, cuts, state)
            outs.append(out)
        return torch.cat(outs, dim=2)

    inside, outside = torch.inference_mode, torch.no_grad
    expected = steps([outside] * 4)
    for modes in ([inside, inside, inside, outside], [outside, outside, inside, outside]):
        assert torch.equal(steps(modes), expected)


@ALL
def test_a_state_of_another_batch_is_refused(name):
    backend, tokens = built(name), inputs(6)
    _, state = extended(backend, tokens, [0, 3, 4])
    with pytest.raises(RuntimeError, match=r"[Ss]izes of tensors must match"):
        backend.extend(*(x[:1, :, 4:5] for x in tokens), state)
