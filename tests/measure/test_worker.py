"""Measurement of one case: every failure is a record, and nothing outside of it changes."""

import signal

import pytest
import torch
from isolated_points import SHARED

from efficient_attn.measure import worker
from efficient_attn.measure.record import Case


def case_of(kind, **changes):
    return Case(**{"kind": kind, "backend": "f", "label": "f", "tokens": 16, **SHARED, **changes})


def mean_of_values(q, k, v):
    return v.mean(dim=-2, keepdim=True).expand_as(v).contiguous()


def test_the_worker_times_and_weighs_a_function_of_three_tensors():
    timed = worker.measure(case_of("time"), target=mean_of_values, seconds=0.01)
    assert timed.status == "ok" and timed.times_s and all(t > 0 for t in timed.times_s)
    weighed = worker.measure(case_of("memory"), target=mean_of_values)
    # The output, and the mean that it repeats: 2 heads of 16 and of one token, 8 entries of 4 bytes.
    assert weighed.peak_bytes == (16 + 1) * 2 * 8 * 4 and weighed.parameter_bytes == 0


def test_forward_and_backward_hold_the_gradients_of_q_k_v():
    forward, both = (
        worker.measure(case_of("memory", backend="exact-dense", backward=backward, tokens=64))
        for backward in (False, True)
    )
    # Three gradients of 2 heads, 64 tokens, 8 entries, 4 bytes are alive at the end.
    assert both.peak_bytes >= forward.peak_bytes + 3 * 2 * 64 * 8 * 4


def test_a_causal_backend_tells_the_bytes_of_its_state():
    case = case_of("memory", backend="performer-positive", causal=True, options={"num_features": 32})
    assert worker.measure(case).state_bytes > 0
    assert worker.measure(case_of("memory", backend="exact")).state_bytes is None


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried …"), "oom"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB"), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("sizes do not match\nand more lines"), "error"),
        (ZeroDivisionError("x" * 10_000), "error"),
    ],
)
@pytest.mark.parametrize("kind", ["time", "memory"])
def test_whatever_a_backend_raises_becomes_a_record_with_a_short_reason(kind, failure, status):
    def broken(q, k, v):
        raise failure

    record = worker.measure(case_of(kind), target=broken)
    assert record.status == status and record.reason.startswith(type(failure).__name__)
    assert len(record.reason) <= 300 and "\n" not in record.reason


def test_a_real_allocation_that_is_refused_is_out_of_memory():
    def greedy(q, k, v):
        return torch.empty(1 << 60, dtype=torch.uint8)

    assert worker.measure(case_of("time"), target=greedy).status == "oom"


def test_what_a_backend_refuses_is_unsupported_in_its_own_words():
    record = worker.measure(case_of("time", backend="linformer", causal=True))
    assert record.status == "unsupported" and "cannot be causal" in record.reason


def test_an_interruption_is_no_failure_of_the_backend():
    def interrupted(q, k, v):
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        worker.measure(case_of("time"), target=interrupted)


def test_measuring_leaves_modules_threads_and_the_generator_as_they_were():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8))

        def forward(self, q, k, v):
            return v * self.weight

    scaled, threads, state = Scaled(), torch.get_num_threads(), torch.get_rng_state()
    record = worker.measure(case_of("time", dtype="bfloat16", threads=1), target=scaled, seconds=0.01)
    assert record.status == "ok"
    assert scaled.weight.dtype == torch.float32 and scaled.training
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)
