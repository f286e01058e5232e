"""How much of the machine's matrix-product rate a call reaches: counted, measured, divided and shown."""

import json
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from efficient_attn.measure import rate
from efficient_attn.runner import calls, counting, worker
from efficient_attn.runner.records import Case, Record
from efficient_attn.stats.rate import rate_share, rate_shares
from efficient_attn.studies.results import Results

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
TIMED = Record(case=CASE, times_s=(1.0, 2.0, 3.0), flops=10, matmul_flops_per_s=20.0)


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


def test_the_rate_is_that_of_the_fastest_product_of_the_fastest_size(monkeypatch):
    """On a clock by which squares of 256 take 3, 2, 2 … ms and those of 512 take 60, 50, 40, 50 … ms."""
    times_s = {256: iter([9, 3e-3, *[2e-3] * 9]), 512: iter([9, 60e-3, 50e-3, 40e-3, *[50e-3] * 9])}
    monkeypatch.setattr(rate.clock, "clock", lambda device: lambda call: next(times_s[len(call())]))
    # 512 takes more than eight times as long as 256, which therefore wins; first calls do not count.
    assert rate.product_rate("float32", "cpu") == 2 * 256**3 / 2e-3


def test_the_rate_is_measured_once_for_dtype_device_and_threads_and_only_where_it_is_of_use(monkeypatch):
    asked = []
    monkeypatch.setattr(counting, "product_rate", lambda *settings: asked.append(settings) or 1e9)
    counting.machine_rate.cache_clear()
    try:
        records = [worker.measure(replace(CASE, tokens=tokens), seconds=0.0) for tokens in (4, 8)]
        assert asked == [("float32", "cpu")]
        worker.measure(replace(CASE, dtype="float64"), seconds=0.0)
        worker.measure(replace(CASE, threads=2), seconds=0.0)
        assert asked == [("float32", "cpu"), ("float64", "cpu"), ("float32", "cpu")]
        unknown = worker.measure(replace(CASE, dtype="bfloat16"), target=lambda q, k, v: v, seconds=0.0)
        assert len(asked) == 3
    finally:
        counting.machine_rate.cache_clear()
    assert [record.matmul_flops_per_s for record in records] == [1e9, 1e9]
    assert (unknown.status, unknown.flops, unknown.matmul_flops_per_s) == ("ok", None, None)


def test_the_share_is_operations_per_second_of_the_median_call_over_the_rate():
    assert rate_share(TIMED) == 10 / 2.0 / 20.0


@pytest.mark.parametrize(
    "changes", [{"flops": None}, {"matmul_flops_per_s": None}, {"times_s": None}, {"status": "timeout"}]
)
def test_there_is_no_share_where_something_is_unknown(changes):
    assert rate_share(replace(TIMED, **changes)) is None


def test_the_share_stands_in_table_summary_and_data_frame_and_no_number_where_it_is_unknown():
    unknown = replace(CASE, backend="mine", label="mine")
    results = Results([TIMED, Record(case=unknown, times_s=(1.0,))])
    (table,) = results.tables()
    column = table.columns.index("share of rate")
    assert {row[0]: row[column] for row in table.rows} == {"exact-dense": "25%", "mine": ""}
    assert any(
        "20.0 GFLOP/s" in note
        for note in Results([replace(TIMED, matmul_flops_per_s=2e10)]).tables()[0].notes
    )
    shares = {row["label"]: row["rate_share"] for row in results.summary()}
    assert shares == {"exact-dense": 0.25, "mine": None}
    frame = results.to_pandas().set_index("label")
    assert frame.loc["exact-dense", "rate_share"] == 0.25 and frame["rate_share"].isna()["mine"]
    assert json.loads(frame.loc[["exact-dense"]].to_json(orient="records"))[0]["flops"] == 10


def test_no_share_is_told_of_a_rate_that_a_call_exceeds_and_a_note_says_so():
    """Rates of 20 and, in another process, of 10 operations a second; 25 are reached."""
    longer, other = (replace(CASE, tokens=tokens) for tokens in (32, 64))
    records = [
        TIMED,
        Record(case=longer, times_s=(1.0,), flops=25, matmul_flops_per_s=20.0),
        Record(case=other, times_s=(1.0,), flops=5, matmul_flops_per_s=10.0),
    ]
    assert rate_shares(records) == {other.key: 0.5}
    results = Results(records)
    assert [row["rate_share"] for row in results.summary()] == [None, None, 0.5]
    assert results.to_pandas()["rate_share"].isna().tolist() == [True, True, False]
    (table,) = results.tables()
    assert "exact-dense at 32 tokens" in table.notes[-1]
    (table,) = Results(records[:2]).tables()
    assert "share of rate" not in table.columns and "exact-dense at 32 tokens" in table.notes[-1]
    # All of it is possible.
    assert rate_shares([replace(TIMED, flops=40)]) == {CASE.key: 1.0}


def test_nothing_is_said_of_rates_where_none_was_measured():
    (table,) = Results([Record(case=CASE, times_s=(1.0,))]).tables()
    assert "share of rate" not in table.columns and not any("rate" in note for note in table.notes)


def test_the_rate_of_this_machine_is_one_that_a_machine_can_have():
    """From a million to 10^17 operations a second: units are right, whatever the machine."""
    assert 1e6 < rate.product_rate("float32", "cpu") < 1e17
    assert torch.is_grad_enabled()
