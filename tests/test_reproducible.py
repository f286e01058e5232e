"""What can be had again, bit for bit: outputs, errors and bytes, in new processes, alone and in a sweep."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import efficient_attn as ea
from efficient_attn import bench

SIZES = {"num_heads": 2, "head_dim": 8}
TIMED = ("times_s", "round_sizes", "waited_s", "matmul_flops_per_s")

# Outputs and gradients of every backend as a hash, and the results of both experiments without times.
SCRIPT = f"""
import hashlib, json, sys
import torch
import efficient_attn as ea
from efficient_attn.measure.records import line

torch.set_num_threads(1)
digest = hashlib.sha256()
generator = torch.Generator().manual_seed(0)
for name in ea.list_backends():
    q, k, v = (torch.randn(1, 2, 33, 8, generator=generator, requires_grad=True) for _ in range(3))
    backend = ea.build(name, head_dim=8, num_heads=2, max_tokens=300)
    if backend.needs_calibration:
        backend.calibrate(q.detach(), k.detach())
    output = backend(q, k, v)
    for tensor in (output, *torch.autograd.grad(output.square().sum(), [q, k, v])):
        digest.update(tensor.detach().numpy().tobytes())
costs = ea.bench(
    seq_lens=(16, 300), num_heads=2, head_dim=8, threads=1, isolate="none", rounds=1, budget_s=60
)
errors = ea.mse(sizes=(8, 16), seq_lens=64, inputs=("gaussian",), draws=3)
rows = [json.loads(line(record)) for record in (*costs.records, *errors.records)]
kept = [{{name: value for name, value in row.items() if name not in {TIMED}}} for row in rows]
print(json.dumps([digest.hexdigest(), kept], sort_keys=True))
"""


def qkv(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return tuple(
        torch.randn(2, 2, 67, 8, generator=generator, dtype=dtype, requires_grad=True) for _ in range(3)
    )


def built(name):
    backend = ea.build(name, **SIZES, max_tokens=300)
    if backend.needs_calibration:
        backend.calibrate(*(x.detach() for x in qkv()[:2]))
    return backend


def forward_and_backward(backend, tensors):
    output = backend(*tensors)
    return output, *torch.autograd.grad(output.square().sum(), tensors)


@pytest.mark.slow
def test_two_processes_give_the_same_bits_of_outputs_gradients_errors_and_bytes():
    def told(hash_seed):
        environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
        run = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, check=True)
        return run.stdout

    with ThreadPoolExecutor() as pool:
        one, other = pool.map(told, (1, 2))
    assert one == other
    _, rows = json.loads(one)
    found = {row["kind"] for row in rows if row["status"] == "ok"}
    assert found == {"time", "memory", "error"}


@pytest.mark.slow
def test_a_point_alone_is_the_point_of_a_sweep():
    names = ["linformer", "performer-positive", "performer-trig", "window"]
    several = {"seq_lens": 64, "inputs": ("gaussian",), "norms": (0.5, 1.0), "draws": 3}
    sweep = {record.case.key: record for record in ea.mse(names, sizes=(8, 16), **several).records}
    for name in names:
        for record in ea.mse([name], sizes=(16,), **{**several, "norms": (1.0,)}).records:
            assert record == sweep[record.case.key]


@pytest.mark.slow
def test_the_bytes_of_a_point_alone_are_those_of_a_sweep_three_times_over():
    settings = {**SIZES, "threads": 1, "isolate": "none", "rounds": 1, "budget_s": 60}

    def bytes_of(names, lengths):
        records = bench(names, seq_lens=lengths, **settings).records
        return {r.case.key: (r.peak_bytes, r.parameter_bytes) for r in records if r.case.kind == "memory"}

    sweep = bytes_of(["performer-positive", "window"], (16, 32))
    alone = [bytes_of(["window"], (32,)) for _ in range(3)]
    assert alone[0] == alone[1] == alone[2] and all(sweep[key] == value for key, value in alone[0].items())


@pytest.mark.parametrize("name", ea.list_backends())
def test_twenty_calls_give_the_same_bits_forward_and_backward(name):
    backend, tensors = built(name), qkv()
    first = forward_and_backward(backend, tensors)
    for _ in range(20):
        assert all(map(torch.equal, forward_and_backward(backend, tensors), first))


@pytest.mark.parametrize("name", ea.list_backends())
def test_the_number_of_threads_changes_no_more_than_rounding(name):
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(forward_and_backward(built(name), qkv(torch.float64)))
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        # As far as two formulas of the same thing may differ in float64.
        assert (one - two).abs().max() <= 1e-12 * one.abs().max()
