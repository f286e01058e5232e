"""Every backend on a CUDA device against float64, and its calls: compiled, captured, long and timed.

`pytest -m gpu -n 0`; EFFICIENT_ATTN_GPU_TESTS=cpu runs on the CPU, at small sizes, what does not need CUDA
itself.
"""

from functools import partial
from itertools import pairwise
from statistics import median

import pytest
import torch
from plain_attention import LARGE, SMALL, Problem, Sizes, bounds, error, problem, results
from small_backends import FORMS
from torch import Tensor

import efficient_attn as ea
from efficient_attn.measure import memory
from efficient_attn.ops import paths
from efficient_attn.stats.estimates import call_time, on_device

pytestmark = [
    pytest.mark.gpu,
    # What PyTorch says of itself on a GPU.
    *map(
        pytest.mark.filterwarnings,
        (
            "ignore:.*torch.jit.script_method:DeprecationWarning",
            "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
            "ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning",
            "ignore:Synchronization debug mode is a prototype:UserWarning",
            "ignore:TensorFloat32 tensor cores:UserWarning",
        ),
    ),
]

BFLOAT16 = torch.bfloat16
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LINEAR = [name for name in ea.list_backends() if name.startswith(("linear-", "performer-"))]
STREAMING = [name for name in ea.list_backends() if ea.spec(name).capabilities.streaming]
# Outputs that CUDA adds by atomics, in any order: the sums over clusters (`scatter_add_`, `index_add_`).
ATOMIC_OUTPUTS = {("window-clusters", False), ("block-topk", False), ("block-topk", True)}
# Gradients too: those of queries in fused attention, and of repeated factors (`index_add`).
ATOMIC_GRADIENTS = {"exact", "linformer", "nystrom", "window", "window-clusters", "linear-taylor-2"}
ATOMIC_GRADIENTS |= {"bigbird", "block-topk"}
# Tensors of a step: exponents, features and states, and those of the rows that are computed again.
STEP_TENSORS = 48
# Memory of all tokens beside a step: q, k, v and the output in float32.
BYTES_OF_A_NUMBER = 16


@pytest.fixture
def sizes(device: str) -> Sizes:
    return SMALL if device == "cpu" else LARGE


# Grouped queries come with masks and other lengths of keys.
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "causal"), FORMS)
def test_errors_are_at_most_twice_those_of_a_plain_implementation(
    device, sizes, name, causal, dtype, grouped
):
    task = problem(name, dtype, device, sizes, causal=causal, grouped=grouped)
    names = ("output", "gradient of q", "gradient of k", "gradient of v")
    for what, x, (expected, bound) in zip(names, results(task.call, task.inputs), bounds(task), strict=True):
        assert x.dtype is dtype and x.device.type == device
        assert error(x, expected) <= bound, what


@pytest.mark.parametrize(("name", "causal"), FORMS)
def test_the_plain_implementation_is_the_formula_of_the_backend(device, name, causal):
    task = problem(name, torch.float32, device, SMALL, causal=causal, grouped=True)
    pairs = zip(results(task.plain, task.wide_inputs), task.exact(), strict=True)
    if task.written_out:
        assert max(error(x, expected) for x, expected in pairs) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "causal"), FORMS)
def test_repeated_calls_give_the_same_bits(device, sizes, name, causal, dtype):
    task = problem(name, dtype, device, sizes, causal=causal, grouped=True)
    first, second = (list(results(task.call, task.inputs)) for _ in range(2))
    exactly = len(first)
    if device == "cuda" and name in ATOMIC_GRADIENTS:
        exactly = 0 if (name, causal) in ATOMIC_OUTPUTS else 1
    assert all(map(torch.equal, first[:exactly], second[:exactly]))
    for x, again, (_, bound) in zip(first, second, bounds(task), strict=True):
        assert error(x, again) <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", STREAMING)
def test_token_by_token_is_the_whole(device, sizes, name, dtype):
    task = problem(name, dtype, device, sizes, causal=True)
    tokens = sizes.tokens
    # A prefill, single tokens across the end of a chunk of 64, and the rest at once.
    ends = [0, 60, *range(61, 68), tokens]
    parts, state = [], None
    with torch.no_grad():
        for start, end in pairwise(ends):
            out, state = task.backend.extend(*(x[..., start:end, :] for x in task.inputs), state)
            parts.append(out)
    expected, bound = bounds(task)[0]
    assert error(torch.cat(parts, dim=-2), expected) <= bound


@pytest.mark.parametrize(("name", "causal"), [x for x in FORMS if ea.spec(x[0]).capabilities.compile])
def test_compiled_without_a_graph_break_it_keeps_to_the_bounds(device, name, causal):
    if device == "cuda" and (name, causal) == ("window-clusters", False) and torch.__version__ < "2.13":
        pytest.xfail("PyTorch 2.11 does not compile torch.searchsorted in a view for GPUs")
    torch.compiler.reset()
    task = problem(name, BFLOAT16, device, SMALL if device == "cpu" else LARGE, causal=causal)
    compiled = torch.compile(
        task.backend, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor"
    )
    for x, (expected, bound) in zip(results(compiled, task.inputs), bounds(task), strict=True):
        assert error(x, expected) <= bound


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("name", "causal"), FORMS)
def test_a_captured_graph_replays_the_call_on_new_inputs(cuda, name, causal, backward):
    task = problem(name, BFLOAT16, cuda, LARGE, causal=causal)
    inputs = [x.clone().requires_grad_(backward) for x in task.inputs]

    def call(inputs: list[Tensor]) -> tuple[Tensor, ...]:
        out = task.backend(*inputs)
        return (out, *torch.autograd.grad(out, inputs, torch.ones_like(out))) if backward else (out,)

    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    # Calls on a side stream before the capture, as torch's documentation asks.
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call(inputs)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        replayed = call(inputs)
    with torch.no_grad():
        for x in inputs:
            x.copy_(x.roll(1, dims=-2))
    # Leaves of the capture belong to its stream.
    leaves = [x.detach().clone().requires_grad_(backward) for x in inputs]
    graph.replay()
    for x, expected in zip(replayed, call(leaves), strict=True):
        # Both are rounded, and atomics add in another order.
        assert error(x.detach(), expected.detach()) <= 2 * torch.finfo(BFLOAT16).eps


@pytest.mark.parametrize(("name", "causal"), FORMS)
def test_no_call_waits_for_the_device(cuda, name, causal):
    task = problem(name, BFLOAT16, cuda, LARGE, causal=causal, grouped=True)
    use = partial(all_verbs, task)
    # Kernels are compiled and tables are copied by the first calls.
    use()
    try:
        torch.cuda.set_sync_debug_mode("error")
        use()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def all_verbs(task: Problem) -> None:
    """A forward and a backward pass, and a step after a prefill where the backend streams."""
    leaves = [x.clone().requires_grad_() for x in task.inputs]
    out = task.call(*leaves)
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    if task.causal and task.name in STREAMING:
        q, k, v = (x[..., -task.inputs[0].shape[-2] :, :] for x in task.inputs)
        with torch.no_grad():
            _, state = task.backend.extend(q, k, v)
            task.backend.extend(*(x[..., -1:, :] for x in (q, k, v)), state)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [*LINEAR, "window"])
def test_a_million_tokens_take_bounded_memory_and_are_computed_as_few_are(device, monkeypatch, name, causal):
    tokens, few, head_dim = (2**20, 2**12, 64) if device == "cuda" else (2**12, 2**8, 16)
    if device == "cpu":
        monkeypatch.setattr(paths, "HELD", 2**14)
    options = {"num_features": 4 * head_dim, "window": 2 * head_dim + 1, "rank": 1}
    sizes = Sizes(batch=1, heads=2, tokens=few, head_dim=head_dim, **options)
    task = problem(name, BFLOAT16, device, sizes, causal=causal)
    # Repeated tokens have the means of one repetition; a window, and a causal call, begin as a short one.
    inputs = [x.repeat(1, 1, tokens // few, 1) for x in task.inputs]
    with torch.no_grad():
        short, long = task.backend(*task.inputs), task.backend(*inputs)
        assert error(long[..., : few // 2, :], short[..., : few // 2, :]) <= 2 * torch.finfo(BFLOAT16).eps
        assert long.isfinite().all()
        peak = memory.peak(partial(task.backend, *inputs), device=device).peak_bytes
    # Learned maps hold queries and keys in float32, and their two halves of features, for all tokens.
    learned = 2 * (4 + 2 * 4) if any(True for _ in task.backend.parameters()) else 0
    assert peak <= (BYTES_OF_A_NUMBER + learned) * long.numel() + STEP_TENSORS * 4 * paths.HELD


def test_bench_measures_every_backend_end_to_end(device, tmp_path):
    lengths = (256, 512) if device == "cuda" else (16, 32)
    sizes = {"inputs": "encoder", "options": {"linformer": {"rank": [8]}}}
    names = ["exact", "window", "linformer", "performer-positive", "linear-elu"]
    run = ea.bench(names, device=device, dtype="bfloat16", seq_lens=lengths, out=tmp_path, rounds=1, **sizes)
    # Time and memory of each, and errors on three layers, of the baseline too.
    assert len(run.records) == (2 * len(names) + 3 * (len(names) + 1)) * len(lengths)
    assert {record.status for record in run.records} == {"ok"}
    assert all(record.kernels for record in ea.read(tmp_path).records)
    times = [record for record in run.records if record.case.kind == "time"]
    assert all((record.device_times_s is not None) == (device == "cuda") for record in times)


# Long enough that the device works longer than the host takes to enqueue the call, whose gaps are left out of
# device times and counted by do_bench. FlexAttention is compiled anew in every process, not always to equally
# fast code.
@pytest.mark.parametrize(("name", "tokens"), [("exact", 16_384), ("window", 65_536)])
def test_device_times_agree_with_do_bench(cuda, name, tokens):
    testing = pytest.importorskip("triton.testing", reason="triton is not installed")
    heads = 16
    run = ea.bench([name], device=cuda, dtype="bfloat16", num_heads=heads, seq_lens=tokens, rounds=4)
    (record,) = (row for row in run.records if row.case.kind == "time" and row.case.label == name)
    backend = ea.build(name, head_dim=64, num_heads=heads).to(cuda, BFLOAT16)
    inputs = torch.randn(3, 1, heads, tokens, 64, device=cuda, dtype=BFLOAT16).unbind()
    with torch.no_grad():
        times_ms = testing.do_bench(lambda: backend(*inputs), return_mode="all")
    assert call_time(on_device(record)).median == pytest.approx(median(times_ms) / 1000, rel=0.1)
