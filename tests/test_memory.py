"""Memory: known patterns are measured to the byte, the same each time."""

import pytest
import torch

from efficient_attn.measure import memory

SIZE = 1 << 20


def block(size=SIZE):
    return torch.empty(size, dtype=torch.uint8)


def one_after_the_other():
    for _ in range(3):
        block()
    return block(SIZE // 4)


def two_at_once():
    one, other = block(), block(SIZE // 2)
    del one, other
    return block(SIZE // 4)


def nested():
    outer = block()
    for _ in range(2):
        inner = block(SIZE // 2)
        del inner
    return outer


PATTERNS = {
    one_after_the_other: (SIZE, SIZE // 4),
    two_at_once: (SIZE * 3 // 2, SIZE // 4),
    nested: (SIZE * 3 // 2, SIZE),
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_known_pattern_is_measured_to_the_byte_three_times_over(pattern):
    assert memory.allocations_are_seen()
    for _ in range(3):
        assert memory.peak(pattern, device="cpu") == (*PATTERNS[pattern], memory.ALLOCATIONS, None)


def test_what_was_allocated_before_and_is_freed_inside_does_not_count():
    held = [block()]
    assert memory.peak(held.clear, device="cpu").peak_bytes == 0


def test_written_out_softmax_attention_takes_two_score_matrices():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 256, 64)

    def attention():
        return torch.softmax(q @ k.mT, dim=-1) @ v

    attention()
    found = memory.peak(attention, device="cpu")
    assert (found.peak_bytes, found.kept_bytes) == (2 * 2 * 256 * 256 * 4, 2 * 256 * 64 * 4)


def test_where_events_cannot_be_read_results_are_counted_and_labelled(monkeypatch):
    monkeypatch.setattr(memory, "_allocations", lambda run: iter(()))
    memory.allocations_are_seen.cache_clear()
    try:
        assert memory.peak(two_at_once, device="cpu") == (
            *PATTERNS[two_at_once],
            memory.OPERATOR_RESULTS,
            None,
        )
    finally:
        memory.allocations_are_seen.cache_clear()


def test_views_of_the_inputs_are_no_memory_of_their_own(monkeypatch):
    x = torch.ones(100)
    assert memory._operator_peak(lambda: x.view(10, 10)).peak_bytes == 0


def test_parameters_and_states_are_counted_once_however_they_are_shared():
    module = torch.nn.Linear(4, 3)
    module.register_buffer("again", module.weight.detach())
    assert memory.parameter_bytes(module) == (12 + 3) * 4
    tensor = torch.zeros(10, dtype=torch.float64)
    assert memory.state_bytes((tensor, (tensor[:5], None), torch.zeros(2))) == 80 + 8
