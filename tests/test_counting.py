"""Operation counts of the measured call are those of torch."""

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from efficient_attn.measure import calls
from efficient_attn.measure.record import replace
from efficient_attn.measure.records import Case

CASE = Case(
    kind="time",
    backend="exact-dense",
    label="exact-dense",
    batch=2,
    num_heads=2,
    head_dim=8,
    tokens=16,
    dtype="float32",
    device="cpu",
    threads=1,
)


class Operations(TorchDispatchMode):
    """torch's formulas without FlopCounterMode, whose hooks do not stand autograd.grad."""

    flops = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if formula := flop_registry.get(function.overloadpacket):
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("of", "layers", "backend"),
    [
        ("attention", None, "exact-dense"),
        ("block", None, "exact-dense"),
        ("encoder", 3, "exact-dense"),
        ("block", None, calls.CEILING),
    ],
)
def test_the_operations_of_a_case_are_those_that_torch_counts_in_its_call(of, layers, backend, backward):
    case = replace(CASE, of=of, layers=layers, backend=backend, label=backend, backward=backward)
    prepared = calls.prepare(case, backend)
    with Operations() as counted:
        prepared.call()
    assert prepared.flops == counted.flops


def test_keys_have_the_heads_of_the_case_and_a_group_shares_what_depends_on_keys_alone():
    case = replace(CASE, num_heads=6, num_kv_heads=2)
    prepared = calls.prepare(case, case.backend)
    assert [x.shape[1] for x in prepared.inputs] == [6, 2, 2]
    with Operations() as counted:
        prepared.call()
    assert prepared.flops == counted.flops
    # Linformer's projections of keys are counted once for each of their heads.
    few, many = (
        calls.prepare(
            replace(case, backend="linformer", options={"rank": 4}, num_kv_heads=heads), "linformer"
        )
        for heads in (2, 6)
    )
    assert many.flops - few.flops == 2 * 2 * (6 - 2) * 2 * 16 * 4 * 8
