"""Sequences distributed over processes: outputs, gradients and refusals on 2 and on 4 ranks."""

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "ranks.py"
PAGE = Path(__file__).parent.parent / "docs/distributed.md"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[2, 4])
def lines(request, tmp_path_factory):
    """Lines that the first of several processes prints."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    command = [sys.executable, "-W", "error", str(SCRIPT)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(request.param), str(store)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(request.param)
    ]
    try:
        done = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert {rank.returncode for rank in ranks} == {0}, "\n".join(error for _, error in done)
    found = defaultdict(list)
    for line in done[0][0].splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            found[row["what"]].append(row)
    return found


def limit(case, alone):
    """Largest relative error of the parts; `alone` is the rounding of one process in the same dtype."""
    *_, norm, dtype = case
    if dtype != "torch.float64":
        # As much rounding again, and one more of the exchanged tensors.
        return 2 * alone + {"torch.float32": 2**-23, "torch.bfloat16": 2**-7}[dtype]
    return 1e-13 * max(norm, 1.0)


def test_outputs_and_gradients_are_those_of_one_process(lines):
    assert len(lines["error"]) >= 60
    pairs = [
        (row["case"], *pair)
        for row in lines["error"]
        for pair in zip(row["parts"], row["whole"], strict=True)
    ]
    assert [one for one in pairs if not one[1] <= limit(one[0], one[2])] == []


def test_positions_of_models_go_on_from_rank_to_rank(lines):
    assert len(lines["model"]) == 24 + (len(lines["scan"]) == 4)
    assert [row for row in lines["model"] if not max(row["errors"]) <= 1e-13] == []


def test_scans_of_causal_states_give_outputs_and_gradients_of_one_process(lines):
    assert len(lines["scan"]) >= 4
    assert [row for row in lines["scan"] if not max(row["errors"]) <= 1e-13] == []


def test_decoding_goes_on_from_a_prefill_on_all_ranks(lines):
    assert len(lines["decoding"]) == 6
    assert [row for row in lines["decoding"] if not (row["error"] <= 1e-13 and row["same"])] == []


def test_ranks_that_call_differently_are_refused_by_one_message_on_all(lines):
    refused = {row["of"]: set(row["ranks"]) for row in lines["refusal"]}
    assert refused.pop("nothing") == {"an output"}
    for messages in refused.values():
        (message,) = messages
        assert message.startswith("ShapeError: Rank ")
        assert "and rank 0 calls" in message
    assert "[1, 2, 6, 8]" in str(refused["shape"])
    assert "q float64" in str(refused["dtype"])
    assert "that needs a gradient" in str(refused["gradient"])
    assert "key_mask bool" in str(refused["mask"])
    assert "linear-elu(), causal" in str(refused["backend"])


def test_the_example_of_the_page_runs_under_torchrun(tmp_path):
    code, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    # Threads of gloo in torch 2.13 abort some processes while the interpreter ends.
    (tmp_path / "example.py").write_text(f"{code}\nimport os\n\nos._exit(0)\n", encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
