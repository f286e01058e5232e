"""Triton kernels: errors under the interpreter and on a GPU, resources as compiled without one."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cuda_kernels
import pytest
import torch
from rank_processes import output_of

from efficient_attn.ops import cuda
from efficient_attn.ops.cuda.tiles import tiles

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
SCRIPT = Path(cuda_kernels.__file__)
# By name: the case of `gpu-check` that rejects the fault, and what changes in a file.
ROWS = Path(__file__).with_name("kernel_faults.tsv").read_text(encoding="utf-8").splitlines()[1:]
FAULTS = {name: row for name, *row in (row.replace("⏎", "\n").split("\t") for row in ROWS)}
# Bytes of shared memory of a block.
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
ON_GPU = [
    {"dtype": dtype, "norm": norm, "tokens": tokens, "features": 256, "dim": dim, **rest}
    for dtype, norm, tokens, dim, rest in (
        ("bfloat16", 1.0, 65, 64, {}),
        ("bfloat16", 5.0, 63, 64, {"masked": True}),
        ("bfloat16", 20.0, 129, 64, {"heads": 4, "kv_heads": 2}),
        ("bfloat16", 60.0, 1000, 64, {"masked": True}),
        ("bfloat16", 5.0, 4097, 64, {}),
        ("bfloat16", 5.0, 300, 128, {"queries": 100}),
        ("float16", 20.0, 1000, 40, {"masked": True}),
        ("float32", 5.0, 1000, 64, {"masked": True}),
        ("float32", 60.0, 333, 64, {}),
        ("float32", 1.0, 200, 128, {"kind": "hyperbolic", "weights": True, "heads": 1}),
    )
]


def child(*arguments: str, **environment: str) -> Any:
    return json.loads(output_of(SCRIPT, *arguments, variables=environment))


def check(measured: dict[str, list[float]], *, float32: bool) -> None:
    least = 1e-6 if float32 else 0.0
    for computed, yardstick, factor in zip(*measured.values(), (2, 4, 4, 4), strict=True):
        assert computed <= factor * yardstick + least


def interpreted(*arguments: str) -> Any:
    return child(*arguments, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", cuda_kernels.CASES)
def test_interpreted_kernels_are_as_accurate_as_the_algorithm_of_the_cpu(name):
    check(interpreted("interpret", name), float32=True)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("case", cuda_kernels.CHECKED)
def test_gpu_check_passes_the_interpreted_kernels(case):
    result = interpreted("check", case)
    assert result["served"] == 1 and not result["failures"]
    # A row that sees one key returns its value, whatever the rounding of its weight.
    assert case != "half, one token" or result["worst"]["forward"] == 0


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(("case", "file", "old", "new"), FAULTS.values(), ids=FAULTS)
def test_gpu_check_rejects_interpreted_kernels_with_a_fault(case, file, old, new, tmp_path):
    source = Path(cuda.__file__).with_name(file).read_text(encoding="utf-8")
    assert source.count(old) == 1
    (tmp_path / file).write_text(source.replace(old, new), encoding="utf-8")
    result = interpreted("check", case, str(tmp_path))
    # A kernel that fails to run has no errors of gradients.
    assert result["failures"] and len(result["worst"]) == 3


class Launches:
    """In place of a kernel: counts its launches, and bytes of the tensors that each reads or writes."""

    def __init__(self, name: str, seen: list[tuple[str, int]]) -> None:
        self.name, self.seen = name, seen

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **named: Any) -> None:
            slots = {} if named.get("WRITE", True) else {"sums": None, "ones": None, "references": None}
            tensors = [x for x in (*args, *(named | slots).values()) if isinstance(x, torch.Tensor)]
            self.seen.append((self.name, sum(x.nbytes for x in tensors)))

        return launch


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("tokens", [16_384, 65_536])
def test_launches_do_not_grow_with_the_length_and_bytes_stay_within_their_bound(tokens, monkeypatch):
    from efficient_attn.ops.cuda import causal

    seen: list[tuple[str, int]] = []
    for name in [name for name in vars(causal) if name.endswith("_kernel")]:
        monkeypatch.setattr(causal, name, Launches(name, seen))
    case = {"tokens": tokens, "heads": 8, "kv_heads": 8, "dim": 64, "features": 256, "dtype": "bfloat16"}
    # A tensor without data shows any question of the host.
    inputs, g = cuda_kernels.case_inputs({**case, "tokens": 1}, "cpu")
    q, k, v, g = (x.new_empty(2, 8, tokens, 64, device="meta") for x in (*inputs[:3], g))
    assert inputs.directions is not None
    inputs = inputs._replace(q=q, k=k, v=v, directions=inputs.directions.to("meta"))
    tile = tiles((9, 0), torch.bfloat16, 64)[0]
    outputs, _ = causal.forward(inputs, None, tile=tile)
    launched = [name.removesuffix("_kernel") for name, _ in seen]
    assert launched == ["walk", "scan", "walk", "chunk", "repair"]
    # Keys and values in three launches, queries and output in one; the repair reads flags alone.
    state = 256 * 64 * 2
    chunks, segments = 2 * 8 * tokens // tile.tokens * state, 2 * 8 * 33 * state * 2
    moved = sum(moved for name, moved in seen if name != "repair_kernel")
    assert moved == pytest.approx(8 * q.nbytes + 2 * chunks + 4 * segments, rel=0.05)
    seen.clear()
    causal.backward(inputs, None, g, outputs, tile=tile)
    assert len(seen) == 11


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "dim"), [("bfloat16", 64), ("bfloat16", 128), ("float32", 64)])
@pytest.mark.parametrize("capability", SHARED)
def test_compiled_kernels_fit_registers_and_shared_memory(capability, dtype, dim):
    for name, resources in child("compile", str(capability), str(dim), dtype).items():
        # Products in float32 keep operands in local memory, but for walks.
        assert resources["stack"] == 0 or (dtype == "float32" and "walk" not in name), name
        assert resources["registers"] <= 255, name
        assert resources["shared"] <= SHARED[capability] * 1024, name


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU, ids=str)
def test_kernels_on_a_gpu_are_accurate_and_repeat_bit_for_bit(cuda, case):
    dim = cuda_kernels.DEFAULTS["dim"] if "dim" not in case else case["dim"]
    capability, dtype = torch.cuda.get_device_capability(), getattr(torch, case["dtype"])
    tile = tiles(capability, dtype, dim)[0]
    torch.full((2**26,), torch.nan, device=cuda)
    measured = cuda_kernels.errors(case, cuda, tile)
    check(measured, float32=case["dtype"] == "float32")
    assert cuda_kernels.errors(case, cuda, tile)["computed"] == measured["computed"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_calls_on_a_gpu_have_the_same_bits(cuda, dtype):
    from efficient_attn.ops.cuda import causal

    # As many segments as a scan has: a race in it changed 1 of 300 calls.
    case = {"tokens": 4097, "dtype": dtype, "norm": 5.0, "dim": 64, "features": 256}
    inputs, g = cuda_kernels.case_inputs(case, cuda)
    tile = tiles(torch.cuda.get_device_capability(), getattr(torch, dtype), 64)[0]

    def results() -> list[torch.Tensor]:
        outputs, _ = causal.forward(inputs, None, tile=tile)
        return [outputs.out, *causal.backward(inputs, None, g, outputs, tile=tile)[:3]]

    first = results()
    assert all(all(map(torch.equal, first, results())) for _ in range(2000))


@pytest.mark.parametrize("case", [{"features": 24}, {"dim": 8}, {"dim": 144}, {"dtype": "float64"}], ids=str)
def test_kernels_support_calls_within_their_limits_alone(case):
    assert cuda.supports(cuda_kernels.case_inputs({}, "cpu")[0])
    assert not cuda.supports(cuda_kernels.case_inputs(case, "cpu")[0])
