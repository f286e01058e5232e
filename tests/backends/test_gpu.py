"""Every backend on a CUDA device against float64: `pytest -m gpu -n 0`.

EFFICIENT_ATTN_GPU_TESTS=cpu runs the code of these tests on the CPU, at small sizes.
"""

from itertools import pairwise

import pytest
import torch
from plain import LARGE, SMALL, Problem, Sizes, bounds, error, problem, results

import efficient_attn as ea

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = [
    (name, causal)
    for name in ea.list_backends()
    for causal in (False, True)
    if ea.spec(name).capabilities.causal or not causal
]
STREAMING = [name for name in ea.list_backends() if ea.spec(name).capabilities.streaming]
# Outputs that CUDA adds by atomics, in any order: the sums over clusters (`scatter_add_`, `index_add_`).
ATOMIC_OUTPUTS = {("window-clusters", False)}
# Gradients too: those of queries in fused attention, and of repeated factors (`index_add`).
ATOMIC_GRADIENTS = {"exact", "linformer", "window", "window-clusters", "linear-taylor-2"}


@pytest.fixture
def sizes(device: str) -> Sizes:
    return SMALL if device == "cpu" else LARGE


def held(one: Problem) -> None:
    """Compare output and gradients with the reference, within the bounds."""
    names = ("output", "gradient of q", "gradient of k", "gradient of v")
    for name, found, (wanted, bound) in zip(names, results(one.call, one.inputs), bounds(one), strict=True):
        assert found.dtype is one.inputs[0].dtype and found.device.type == one.inputs[0].device.type
        assert error(found, wanted) <= bound, name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "causal"), CASES)
def test_errors_are_at_most_twice_those_of_a_plain_implementation(device, sizes, name, causal, dtype):
    held(problem(name, dtype, device, sizes, causal=causal))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "causal"), CASES)
def test_masks_grouped_queries_and_cross_lengths_keep_to_the_same_bounds(device, sizes, name, causal, dtype):
    held(problem(name, dtype, device, sizes, causal=causal, grouped=True))


@pytest.mark.parametrize(("name", "causal"), CASES)
def test_the_plain_implementation_is_the_formula_of_the_backend(device, name, causal):
    one = problem(name, torch.float32, device, SMALL, causal=causal, grouped=True)
    pairs = zip(results(one.plain, one.wide_inputs), one.exact(), strict=True)
    if one.written_out:
        assert max(error(found, wanted) for found, wanted in pairs) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "causal"), CASES)
def test_repeated_calls_give_the_same_bits(device, sizes, name, causal, dtype):
    one = problem(name, dtype, device, sizes, causal=causal, grouped=True)
    first, second = (list(results(one.call, one.inputs)) for _ in range(2))
    exactly = len(first)
    if device == "cuda" and name in ATOMIC_GRADIENTS:
        exactly = 0 if (name, causal) in ATOMIC_OUTPUTS else 1
    assert all(map(torch.equal, first[:exactly], second[:exactly]))
    for found, other, (_, bound) in zip(first, second, bounds(one), strict=True):
        assert error(found, other) <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", STREAMING)
def test_token_by_token_is_the_whole(device, sizes, name, dtype):
    one = problem(name, dtype, device, sizes, causal=True)
    tokens = sizes.tokens
    # A prefill, single tokens across the end of a chunk of 64, and the rest at once.
    ends = [0, 60, *range(61, 68), tokens]
    found, state = [], None
    with torch.no_grad():
        for start, end in pairwise(ends):
            out, state = one.backend.extend(*(x[..., start:end, :] for x in one.inputs), state)
            found.append(out)
    wanted, bound = bounds(one)[0]
    assert error(torch.cat(found, dim=-2), wanted) <= bound
