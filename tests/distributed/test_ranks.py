"""Sequences distributed over processes: results, refusals, training engines, lost ranks, the examples."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from forked import output_of, rows_of

import efficient_attn as ea
from efficient_attn.errors import UnsupportedError

PAGE = Path(__file__).parents[2] / "docs/distributed.md"
# Timeout of the groups, and the time that a process has for its own end on a busy machine, in seconds.
TIMEOUT_S, END_S = 10, 30
# Roundings of sums in another order: 17 in float32, some hundred in float64.
ROUNDING = {"torch.bfloat16": 2**-7, "torch.float32": 2e-6, "torch.float64": 1e-13}
INSIDE = "Inside torch's context_parallel a backend would attend to the tokens of its own"


def fixture_of(script, *arguments):
    @pytest.fixture(scope="module")
    def rows(tmp_path_factory):
        return rows_of(f"distributed/{script}.py", tmp_path_factory.mktemp(script) / "store", *arguments)

    return rows


parts = fixture_of("ranks")
lost = fixture_of("ranks_lost", TIMEOUT_S)


@pytest.mark.slow
def test_outputs_and_gradients_are_those_of_one_process(parts):
    assert len(parts["attention"]) == 12
    for row in parts["attention"]:
        dtype = row["case"][-1]
        for error, alone in (pair for pairs in row["errors"] for pair in pairs):
            # As much rounding again as in one process, and once more of the exchanged tensors.
            assert error <= ROUNDING[dtype] + (0 if dtype == "torch.float64" else 2 * alone), row["case"]


@pytest.mark.slow
def test_models_of_every_engine_have_the_gradients_of_one_process(parts):
    assert len(parts["training"]) == 19
    for row in parts["training"]:
        assert max(row["errors"]) <= ROUNDING[row["case"][1]], row["case"]


@pytest.mark.slow
def test_decoding_goes_on_from_a_prefill_on_all_ranks(parts):
    assert len(parts["decoding"]) == 3
    for row in parts["decoding"]:
        assert all(error <= 1e-13 and same for error, same in row["errors"]), row["case"]


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


@pytest.mark.slow
def test_no_backend_attends_to_parts_inside_torchs_context_parallel_or_of_dtensors(parts):
    assert [len(parts[what]) for what in ("inside", "afterwards", "sharded")] == [3, 2, 10]
    assert all(text.startswith(INSIDE) for row in parts["inside"] for text in row["errors"])
    assert {text for row in parts["afterwards"] for text in row["errors"]} == {"an output"}
    for row in parts["sharded"]:
        name, axis = row["case"]
        for text in row["errors"]:
            assert f"{name} is a DTensor with placements (Shard(dim={axis}),)" in text
            assert text.endswith(f"give {name}.full_tensor().")


def test_a_replaced_fused_kernel_is_refused_if_torchs_distributed_part_replaced_it(monkeypatch):
    q = torch.randn(1, 2, 8, 4)
    backend, kernel = ea.build("exact", head_dim=4), F.scaled_dot_product_attention
    expected = backend(q, q, q)

    def replaced(*tensors, **options):
        return kernel(*tensors, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", replaced)
    assert torch.equal(backend(q, q, q), expected)
    replaced.__module__ = "torch.distributed.tensor.experimental._context_parallel._attention"
    with pytest.raises(UnsupportedError, match="Inside torch's context_parallel"):
        backend(q, q, q)


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
