"""No backend attends to the tokens of its own process alone where a sequence lies in several."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import efficient_attn as ea
from efficient_attn.errors import UnsupportedError
from efficient_attn.integrations.pytorch import MultiheadAttention

SCRIPT = Path(__file__).parent / "two_ranks.py"
CASES = {
    (name, str(causal))
    for name in ea.list_backends()
    for causal in (False, True)
    if not causal or ea.spec(name).capabilities.causal
}
INSIDE = "UnsupportedError: Inside torch's context_parallel a backend would attend to the tokens of its own"


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What the first of two processes says of every backend: where, name, whether causal, outcome."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    command = [sys.executable, "-W", "ignore", str(SCRIPT)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(store)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        done = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], done[0][1] + done[1][1]
    # Some versions of torch print lines of their own about connections.
    return [line.split("\t") for line in done[0][0].splitlines() if "\t" in line]


def outcomes(reports, where):
    return {(name, causal): outcome for place, name, causal, outcome in reports if place == where}


@pytest.mark.slow
def test_every_backend_refuses_to_attend_inside_torchs_context_parallel(reports):
    inside = outcomes(reports, "context_parallel")
    assert inside.keys() == CASES | {(f"{name}.extend", causal) for name, causal in CASES if causal == "True"}
    assert {outcome for outcome in inside.values() if not outcome.startswith(INSIDE)} == set()


@pytest.mark.slow
def test_every_backend_attends_again_after_context_parallel(reports):
    assert outcomes(reports, "afterwards") == dict.fromkeys(CASES, "an output")


@pytest.mark.slow
@pytest.mark.parametrize("axis", range(4))
def test_every_backend_refuses_tensors_that_are_sharded_over_processes(reports, axis):
    sharded = outcomes(reports, f"Shard({axis})")
    assert sharded.keys() == CASES
    for outcome in sharded.values():
        assert f"q is a DTensor with placements (Shard(dim={axis}),)" in outcome
        assert outcome.endswith("give q.full_tensor().")


@pytest.mark.slow
def test_one_sharded_tensor_among_whole_ones_is_refused_by_its_name(reports):
    assert "key_mask is a DTensor" in outcomes(reports, "mask")["exact", "False"]
    assert "v is a DTensor" in outcomes(reports, "values")["exact", "False"]


def test_a_replaced_fused_kernel_is_refused_if_torchs_distributed_part_replaced_it(monkeypatch):
    q = torch.randn(1, 2, 8, 4)
    backend, kernel = ea.build("exact", head_dim=4), F.scaled_dot_product_attention
    expected = backend(q, q, q)

    def replaced(*tensors, **options):
        return kernel(*tensors, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", replaced)
    assert torch.equal(backend(q, q, q), expected)
    replaced.__module__ = "torch.distributed.tensor.experimental._context_parallel._attention"
    layer, x = MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 4, 8)
    for attend in (lambda: backend(q, q, q), lambda: layer(x, x, x, need_weights=True)):
        with pytest.raises(UnsupportedError, match="Inside torch's context_parallel"):
            attend()
