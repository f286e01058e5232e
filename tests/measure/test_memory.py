"""Memory: known patterns are measured to the byte, the same each time."""

import os
from functools import partial

import pytest
import torch

from efficient_attn.errors import UnsupportedError
from efficient_attn.measure import memory

SIZE = 1 << 20


def block(size=SIZE):
    return torch.empty(size, dtype=torch.uint8)


def nested():
    outer = block()
    for _ in range(2):
        inner = block(SIZE // 2)
        del inner
    return outer


X, GRADIENT, STORAGE = torch.ones(SIZE // 16, requires_grad=True), torch.ones(SIZE // 16), []


def forward_and_backward():
    return torch.autograd.grad(X.exp(), X, GRADIENT)


def kept_beside_the_result():
    STORAGE.append(block(SIZE // 4))
    return block(SIZE // 2)


PATTERNS = {
    # The output, of which the gradient is a multiple, and the gradient.
    forward_and_backward: (SIZE // 2, SIZE // 4),
    kept_beside_the_result: (SIZE * 3 // 4, SIZE * 3 // 4),
    nested: (SIZE * 3 // 2, SIZE),
    # What was allocated before does not count.
    [block()].clear: (0, 0),
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_known_pattern_is_measured_to_the_byte_twice_and_leaves_the_environment_alone(pattern, monkeypatch):
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    before = dict(os.environ)
    for _ in range(2):
        assert memory.peak(pattern, device="cpu") == PATTERNS[pattern]
    assert dict(os.environ) == before


def test_threads_of_operators_are_counted(request):
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(2)
    x = torch.ones(64, 1 << 12)
    assert memory.peak(lambda: x.softmax(dim=-1), device="cpu").peak_bytes == x.numel() * 4


def test_nothing_is_measured_when_the_pattern_comes_out_wrong_or_reading_it_fails(monkeypatch):
    # Without its cache.
    monkeypatch.setattr(memory, "allocations_are_seen", memory.allocations_are_seen.__wrapped__)
    right = memory._allocations

    def doubled(run):
        return ((at, 2 * size) for at, size in right(run))

    def missing(run):
        raise AttributeError("no such part of torch")

    # Torch reads its events under private names alone.
    for wrong in (doubled, missing):
        monkeypatch.setattr(memory, "_allocations", wrong)
        with pytest.raises(UnsupportedError, match="reports no allocations"):
            memory.peak(block, device="cpu")


def test_parameters_and_states_are_counted_once_however_they_are_shared():
    module = torch.nn.Linear(4, 3)
    module.register_buffer("again", module.weight.detach())
    assert memory.parameter_bytes(module) == (12 + 3) * 4
    tensor = torch.zeros(10, dtype=torch.float64)
    assert memory.state_bytes((tensor, (tensor[:5], None), torch.zeros(2))) == 80 + 8
