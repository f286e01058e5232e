"""Distributed sequences with DDP, FSDP2, recomputed activations and split heads; lost ranks; the example."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs/distributed.md"
RANKS = 4
# Timeout of the groups, and the time that a process has for its own end, in seconds.
TIMEOUT_S, END_S = 5, 2
# 17 roundings in float32, for sums in another order; the bound of one backend in float64.
LIMITS = {"torch.float32": 2e-6, "torch.float64": 1e-13}
pytestmark = pytest.mark.slow


def run(*command: object, **options: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=240,
        # Python may leave the folder of a script off its path.
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
        **options,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(script: str, *arguments: object) -> list[dict]:
    """Rows that a script prints."""
    lines = run(TESTS / script, *arguments).splitlines()
    # Some versions of torch print lines of their own about connections.
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.fixture(scope="module")
def composed(tmp_path_factory):
    return rows("ranks_composed.py", tmp_path_factory.mktemp("ranks") / "store")


@pytest.fixture(scope="module")
def lost(tmp_path_factory):
    found = rows("ranks_lost.py", tmp_path_factory.mktemp("lost") / "store", TIMEOUT_S)
    return {row["end"]: row for row in found}


def test_gradients_of_parameters_are_those_of_one_process(composed):
    found = [row for row in composed if row["what"] == "training"]
    # Backends, masks, dtypes and engines.
    assert len(found) == 3 * 2 * 2 * 3
    assert [row for row in found for error in row["errors"] if not error <= LIMITS[row["case"][2]]] == []


def test_heads_may_be_split_over_another_dimension_of_the_mesh(composed):
    found = [row for row in composed if row["what"] == "heads"]
    assert len(found) == 3 * 2
    assert [row for row in found for error in row["errors"] if not error <= LIMITS["torch.float64"]] == []


@pytest.mark.serial
@pytest.mark.parametrize("end", ["killed", "hung", "shape"])
def test_a_lost_rank_ends_the_others_in_time(end, lost):
    row = lost[end]
    assert set(row["codes"]) == {1}
    assert row["errors"].keys() >= {"0", "2", "3"}
    assert row["seconds"] < TIMEOUT_S + END_S


def test_a_rank_with_another_shape_is_named_to_all_ranks_of_its_sequence(lost):
    errors = lost["shape"]["errors"]
    assert errors["0"] == errors["1"]
    assert errors["0"].startswith("ShapeError: Rank 1 of the mesh calls")


def test_the_training_example_of_the_page_learns_under_torchrun(tmp_path):
    (code,) = re.findall(r"```python\n(# train\.py.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    # Threads of gloo in torch 2.13 abort some processes while the interpreter ends.
    leave = "\nimport os, sys\n\nsys.stdout.flush()\nos._exit(0)\n"
    (tmp_path / "train.py").write_text(code + leave, encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS]
    output = run(*launcher, "train.py", cwd=tmp_path)
    losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("step")]
    assert len(losses) > 1
    assert losses[-1] < 0.8 * losses[0]
