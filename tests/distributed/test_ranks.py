"""Sequences distributed over processes: results, refusals, training engines, lost ranks, the examples."""

import re
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_processes import output_of, rows_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel as torchs_parallel

import efficient_attn as ea
from efficient_attn.errors import UnsupportedError

PAGE = Path(__file__).parents[2] / "docs/distributed.md"
# Timeout of the groups, and the time that a process has for its own end on a busy machine, in seconds.
TIMEOUT_S, END_S = 10, 30
# Roundings of sums in another order: 17 in float32, some hundred in float64.
ROUNDING = {"torch.bfloat16": 2**-7, "torch.float32": 2e-6, "torch.float64": 1e-13}


def fixture_of(script, *arguments):
    @pytest.fixture(scope="module")
    def rows(tmp_path_factory):
        return rows_of(f"{script}.py", tmp_path_factory.mktemp(script) / "store", *arguments)

    return rows


parts = fixture_of("ranks")
lost = fixture_of("ranks_lost", TIMEOUT_S)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "rows"), [("attention", 12), ("training", 19), ("decoding", 3)])
def test_outputs_and_gradients_are_those_of_one_process(what, rows, parts):
    assert len(parts[what]) == rows
    for row in parts[what]:
        assert max(row["errors"]) <= ROUNDING[row["case"][-1]], row["case"]


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.parametrize("end", ["killed", "hung", "shape"])
def test_a_lost_rank_ends_the_others_in_time(end, lost):
    (row,) = lost[end]
    assert set(row["codes"]) == {1}
    assert row["errors"].keys() >= {"0", "2", "3"}
    assert row["seconds"] < TIMEOUT_S + END_S
    if end == "shape":
        assert row["errors"]["0"] == row["errors"]["1"]
        assert row["errors"]["0"].startswith("ShapeError: Rank 1 of the mesh calls")


@pytest.fixture
def mesh():
    """A mesh of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_no_backend_attends_to_parts_inside_torchs_context_parallel(mesh, monkeypatch):
    q, k, v = torch.randn(3, 2, 2, 32, 8).unbind()
    exact, kernel = ea.build("exact", head_dim=8), F.scaled_dot_product_attention
    linear = ea.build("performer-positive", head_dim=8, num_features=16, causal=True)
    expected = exact(q, k, v)
    with torchs_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        for call in (exact, linear, linear.extend):
            with pytest.raises(UnsupportedError, match="Inside torch's context_parallel a backend would"):
                call(q, k, v)
    # The kernel of another package is no part of a sequence.
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **named: kernel(*args, **named))
    assert torch.equal(exact(q, k, v), expected)


@pytest.mark.parametrize(("name", "axis"), [*(("q", axis) for axis in range(4)), ("key_mask", 1), ("v", 2)])
def test_no_backend_attends_to_parts_of_dtensors(name, axis, mesh):
    tensors = dict(zip("qkv", torch.randn(3, 2, 2, 32, 8), strict=True))
    tensors["key_mask"] = torch.ones(2, 32, dtype=torch.bool)
    exact = ea.build("exact", head_dim=8)
    whole = {key: distribute_tensor(x, mesh, [Replicate()]) for key, x in tensors.items()}
    refusal = rf"{name} is a DTensor with placements \(Shard\(dim={axis}\),\).* {name}\.full_tensor\(\)\."
    with pytest.raises(UnsupportedError, match=refusal):
        exact(**{**whole, name: distribute_tensor(tensors[name], mesh, [Shard(axis)])})
    # torch 2.8 takes no DTensor on the CPU.
    with suppress(NotImplementedError):
        F.scaled_dot_product_attention(*(whole[key] for key in "qkv"))
        assert torch.equal(exact(*(whole[key] for key in "qkv")).full_tensor(), exact(**tensors))


@pytest.mark.slow
@pytest.mark.parametrize(("first", "ranks"), [("", 2), ("# train.py", 4)])
def test_the_examples_of_the_page_run_under_torchrun(first, ranks, tmp_path):
    codes = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    code = next(code for code in codes if code.startswith(first))
    # Threads of gloo in torch 2.13 abort some processes while the interpreter ends.
    end = "\nimport os, sys\n\nsys.stdout.flush()\nos._exit(0)\n"
    (tmp_path / "example.py").write_text(code + end, encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    output = output_of(*launcher, "example.py", cwd=tmp_path)
    if first:
        losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("step")]
        assert len(losses) > 1 and losses[-1] < 0.8 * losses[0]
