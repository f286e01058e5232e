"""Calls on a CUDA device: compiled, captured, without synchronisation, long, and timed.

`pytest -m gpu -n 0`; EFFICIENT_ATTN_GPU_TESTS=cpu runs on the CPU what does not need CUDA itself.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import pytest
import torch
from backends.test_gpu import CASES, STREAMING
from plain import LARGE, SMALL, Problem, Sizes, bounds, error, problem, results
from torch import Tensor, nn

import efficient_attn as ea
from efficient_attn.measure import memory
from efficient_attn.measure.calls import _executed
from efficient_attn.measure.record import CUDA_GRAPH
from efficient_attn.ops import paths
from efficient_attn.stats.estimates import call_time, on_device

pytestmark = pytest.mark.gpu

BFLOAT16 = torch.bfloat16
LINEAR = [name for name in ea.list_backends() if name.startswith(("linear-", "performer-"))]
# Tensors of a step: exponents, features and states, and those of the rows that are computed again.
STEP_TENSORS = 48
# Memory of all tokens beside a step: q, k, v and the output in float32.
BYTES_OF_A_NUMBER = 16


@pytest.mark.parametrize(
    ("name", "causal"), [case for case in CASES if ea.spec(case[0]).capabilities.compile]
)
def test_compiled_without_a_graph_break_it_keeps_to_the_bounds(device, name, causal):
    torch.compiler.reset()
    one = problem(name, BFLOAT16, device, SMALL if device == "cpu" else LARGE, causal=causal)
    compiled = torch.compile(
        one.backend, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor"
    )
    for found, (wanted, bound) in zip(results(compiled, one.inputs), bounds(one), strict=True):
        assert error(found, wanted) <= bound


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("name", "causal"), CASES)
def test_a_captured_graph_replays_the_call_on_new_inputs(cuda, name, causal, backward):
    one = problem(name, BFLOAT16, cuda, LARGE, causal=causal)
    inputs = [x.clone().requires_grad_(backward) for x in one.inputs]

    def called(module: nn.Module) -> Callable[[], tuple[Tensor, ...]]:
        def call() -> tuple[Tensor, ...]:
            out = module(*inputs)
            return (out, *torch.autograd.grad(out, inputs, torch.ones_like(out))) if backward else (out,)

        return call

    replay = _executed(CUDA_GRAPH, one.backend, called, spec=ea.spec(name), device=cuda)
    with torch.no_grad():
        for x in inputs:
            x.copy_(x.roll(1, dims=-2))
    for found, wanted in zip(replay(), called(one.backend)(), strict=True):
        # Both are rounded, and atomics add in another order.
        assert error(found.detach(), wanted.detach()) <= 2 * torch.finfo(BFLOAT16).eps


@pytest.mark.parametrize(("name", "causal"), CASES)
def test_no_call_waits_for_the_device(cuda, name, causal):
    one = problem(name, BFLOAT16, cuda, LARGE, causal=causal, grouped=True)
    use = partial(all_verbs, one)
    # Kernels are compiled and tables are copied by the first calls.
    use()
    torch.cuda.set_sync_debug_mode("error")
    try:
        use()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def all_verbs(one: Problem) -> None:
    """A forward and a backward pass, and a step after a prefill where the backend streams."""
    leaves = [x.clone().requires_grad_() for x in one.inputs]
    out = one.call(*leaves)
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    if one.causal and one.name in STREAMING:
        q, k, v = (x[..., -one.inputs[0].shape[-2] :, :] for x in one.inputs)
        with torch.no_grad():
            _, state = one.backend.extend(q, k, v)
            one.backend.extend(*(x[..., -1:, :] for x in (q, k, v)), state)


def test_the_verbs_of_every_backend_run(device):
    for name, causal in CASES:
        all_verbs(problem(name, BFLOAT16, device, SMALL, causal=causal, grouped=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [*LINEAR, "window"])
def test_a_million_tokens_take_bounded_memory_and_are_computed_as_few_are(device, monkeypatch, name, causal):
    tokens, few, head_dim = (2**20, 2**12, 64) if device == "cuda" else (2**12, 2**8, 16)
    if device == "cpu":
        monkeypatch.setattr(paths, "HELD", 2**14)
    given: dict[str, Any] = {"batch": 1, "heads": 2, "kv_heads": 2, "head_dim": head_dim, "rank": 1}
    one = problem(
        name,
        BFLOAT16,
        device,
        Sizes(tokens=few, num_features=4 * head_dim, window=2 * head_dim + 1, **given),
        causal=causal,
    )
    # Repeated tokens have the means of one repetition; a window, and a causal call, begin as a short one.
    inputs = [x.repeat(1, 1, tokens // few, 1) for x in one.inputs]
    with torch.no_grad():
        short, long = one.backend(*one.inputs), one.backend(*inputs)
        assert error(long[..., : few // 2, :], short[..., : few // 2, :]) <= 2 * torch.finfo(BFLOAT16).eps
        assert long.isfinite().all()
        peak = memory.peak(partial(one.backend, *inputs), device=device).peak_bytes
    # Learned maps hold queries and keys in float32, and their two halves of features, for all tokens.
    learned = 2 * (4 + 2 * 4) if any(True for _ in one.backend.parameters()) else 0
    assert peak <= (BYTES_OF_A_NUMBER + learned) * long.numel() + STEP_TENSORS * 4 * paths.HELD


def test_bench_measures_every_backend_end_to_end(device, tmp_path):
    lengths = (256, 1024) if device == "cuda" else (16, 32)
    sizes = {"num_heads": 2, "head_dim": 16, "options": {"linformer": {"rank": [8]}}}
    names = ["exact", "window", "linformer", "performer-positive", "linear-elu"]
    found = ea.bench(
        names, device=device, dtype="bfloat16", seq_lens=lengths, out=tmp_path, rounds=1, **sizes
    )
    # Time and memory of each, and errors on three layers, of the baseline too.
    assert len(found.records) == (2 * len(names) + 3 * (len(names) + 1)) * len(lengths)
    assert {record.status for record in found.records} == {"ok"}
    assert all(record.kernels for record in ea.read(tmp_path).records)
    times = [record for record in found.records if record.case.kind == "time"]
    assert all((record.device_times_s is not None) == (device == "cuda") for record in times)


@pytest.mark.parametrize("name", ["exact", "window", "performer-positive"])
def test_device_times_agree_with_do_bench(cuda, name):
    testing = pytest.importorskip("triton.testing", reason="triton is not installed")
    tokens, heads = 16_384, 16
    found = ea.bench([name], device=cuda, dtype="bfloat16", num_heads=heads, seq_lens=tokens, rounds=4)
    (record,) = (one for one in found.records if one.case.kind == "time" and one.case.label == name)
    backend = ea.build(name, head_dim=64, num_heads=heads).to(cuda, BFLOAT16)
    inputs = torch.randn(3, 1, heads, tokens, 64, device=cuda, dtype=BFLOAT16).unbind()
    with torch.no_grad():
        times_ms = testing.do_bench(lambda: backend(*inputs), return_mode="all")
    assert call_time(on_device(record)).median == pytest.approx(median(times_ms) / 1000, rel=0.1)
