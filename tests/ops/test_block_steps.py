"""Decoding steps of chosen blocks: how many operators they run, and that their time follows the keys read."""

import pytest
import torch
from reference import random_mask, random_qkv
from torch.profiler import profile

import efficient_attn as ea

BACKENDS = ("bigbird", "block-topk")
CALLS = 60


def operators(call) -> list[str]:
    """Names of the operators of a call that no other operator runs."""
    with profile() as profiled:
        call()
    events = [event for event in profiled.events() if event.name.startswith("aten::")]
    return [event.name for event in events if not within(event)]


def within(event) -> bool:
    parent = event.cpu_parent
    return parent is not None and (parent.name.startswith("aten::") or within(parent))


@pytest.mark.parametrize("tokens", [3, 130, 2050])
@pytest.mark.parametrize("name", BACKENDS)
@torch.no_grad()
def test_a_step_runs_few_operators_however_long_the_state(name, tokens):
    backend = ea.build(name, head_dim=16, causal=True)
    inputs = random_qkv(1, 4, 2, tokens + 2, tokens + 2, 16, 16)
    _, state = backend.extend(*(x[:, :, :tokens] for x in inputs))
    _, state = backend.extend(*(x[:, :, tokens:-1] for x in inputs), state)
    last = [x[:, :, -1:] for x in inputs]
    assert len(operators(lambda: backend.extend(*last, state))) <= CALLS


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", BACKENDS)
@torch.no_grad()
def test_steps_within_blocks_and_at_their_borders_give_the_full_pass(name, masked):
    options = {"blocks": 1} if name == "block-topk" else {}
    backend = ea.build(name, head_dim=8, causal=True, block=4, **options).double()
    inputs, mask = random_qkv(2, 4, 2, 60, 60, 8), random_mask(2, 60) if masked else None
    state, outs, start = None, [], 0
    for new in (1, 1, 1, 1, 1, 2, 0, 5, 3, 9, *[1] * 14, 0, 3, 16, 1, 1, 1):
        part = slice(start, start + new)
        key_mask = None if mask is None else mask[:, part]
        out, state = backend.extend(*(x[:, :, part] for x in inputs), state, key_mask=key_mask)
        outs.append(out)
        start += new
    torch.testing.assert_close(torch.cat(outs, dim=2), backend(*inputs, key_mask=mask), rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_step_after_a_new_draw_reads_the_blocks_of_that_draw():
    backend, inputs = (
        ea.build("bigbird", head_dim=8, causal=True, block=4).double(),
        random_qkv(1, 2, 2, 63, 63, 8),
    )
    _, state = backend.extend(*(x[:, :, :61] for x in inputs))
    last = [x[:, :, 61:62] for x in inputs]
    before, _ = backend.extend(*last, state)
    backend.redraw(1)
    after, _ = backend.extend(*last, state)
    expected = backend(*(x[:, :, :62] for x in inputs))[:, :, -1:]
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-12)
