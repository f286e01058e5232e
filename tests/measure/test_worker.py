"""Measurement of one case: every failure is a record with its reason, and nothing outside of it changes."""

import math

import pytest
import torch
from small_cases import case_of
from torch import nn

from efficient_attn.backends import build
from efficient_attn.measure import worker
from efficient_attn.measure.error import outputs_checked


def attend(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1) @ v


def mean_of_values(q, k, v):
    return v.mean(dim=-2, keepdim=True).expand_as(v).contiguous()


def test_the_worker_times_and_weighs_a_function_of_three_tensors():
    timed = worker.measure(case_of("f"), target=mean_of_values, seconds=0.01)
    assert timed.status == "ok" and timed.times_s and all(t > 0 for t in timed.times_s)
    weighed = worker.measure(case_of("f", kind="memory"), target=mean_of_values)
    # The output, and the mean that it repeats: 2 heads of 16 and of one token, 8 entries of 4 bytes.
    assert weighed.peak_bytes == (16 + 1) * 2 * 8 * 4 and weighed.parameter_bytes == 0


def greedy(q, k, v):
    return v.new_empty(1 << 58)


def full(q, k, v):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")


def wordy(q, k, v):
    raise ZeroDivisionError("two\nlines" + "x" * 10_000)


BROKEN = [(greedy, "oom", "RuntimeError: "), (full, "oom", "OutOfMemoryError: ")]
BROKEN += [(wordy, "error", "ZeroDivisionError: two lines")]


@pytest.mark.parametrize(("broken", "status", "reason"), BROKEN)
def test_whatever_a_backend_raises_becomes_a_record_with_a_short_reason(broken, status, reason):
    record = worker.measure(case_of("f"), target=broken)
    assert record.status == status and record.reason.startswith(reason)
    assert len(record.reason) <= 300 and "\n" not in record.reason


def test_measuring_leaves_modules_threads_and_the_generator_as_they_were():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.spare = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(3))

        def forward(self, q, k, v):
            return attend(q, k, v) * self.weight

    scaled, threads, state = Scaled(), torch.get_num_threads(), torch.get_rng_state()
    record = worker.measure(case_of("f", dtype="bfloat16", threads=1), target=scaled, seconds=0.01)
    # Parameters that a backend does not use need no gradient.
    backward = worker.measure(case_of("f", backward=True, of="block"), target=scaled)
    assert record.status == backward.status == "ok"
    assert scaled.weight.dtype == torch.float32 and scaled.training
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)


def one_nan(q, k, v):
    output = attend(q, k, v)
    return torch.where(output == output.max(), math.nan, output)


SHAPE = "a tensor [1, 2, 16, 8] of torch.float"


@pytest.mark.parametrize(
    ("wrong", "kind", "of", "said"),
    [
        (lambda q, k, v: None, "time", "attention", f"of type NoneType; expected {SHAPE}32 on cpu"),
        (lambda q, k, v: v.mean(-2, keepdim=True), "memory", "block", "is a tensor [1, 2, 1, 8] of"),
        (lambda q, k, v: v.double(), "time", "attention", f"the output is {SHAPE}64 on cpu"),
        (one_nan, "time", "attention", "1 of 256 entries of the output are not finite"),
    ],
    ids=["nothing", "broadcast", "double", "nan"],
)
def test_a_backend_that_returns_no_output_is_an_error_that_says_what_came(wrong, kind, of, said):
    record = worker.measure(case_of("f", kind=kind, of=of), target=wrong)
    assert record.status == "error" and said in record.reason, record
    assert record.times_s is None and record.peak_bytes is None


def infinite(q, k, v):
    v = v.clone()
    v.register_hook(lambda gradient: gradient / 0)
    return attend(q, k, v)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (lambda q, k, v: attend(q, k.detach(), v.detach()), "no gradient reached k."),
        (infinite, "256 of 256 entries of the gradient of v are not finite."),
    ],
)
def test_a_backward_pass_that_loses_gradients_or_makes_them_infinite_is_an_error(target, said):
    record = worker.measure(case_of("f", backward=True), target=target)
    assert record.status == "error" and said in record.reason, record


def test_what_is_not_finite_already_is_not_held_against_a_backend():
    backend = build(attend, head_dim=8)
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    with outputs_checked(backend):
        backend(q, k, v * math.inf)
        backend(q, k[..., :0, :], v[..., :0, :])
    assert not backend._forward_hooks
