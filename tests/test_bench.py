"""`bench` from Python: the yardstick, the workload, the files, anybody's function."""

import json
import signal
from itertools import product

import pytest
import torch
from planned import points_of

from efficient_attn import bench
from efficient_attn.errors import DataError, OptionError, UnsupportedError
from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import CEILING
from efficient_attn.ops.paths import VARIABLE
from efficient_attn.studies import find
from efficient_attn.studies.workload import Workload, settle

pytestmark = pytest.mark.usefixtures("hasty")

SMALL = {
    "seq_lens": (16, 32),
    "num_heads": 2,
    "head_dim": 8,
    "budget_s": 3600,
    "isolate": "none",
    "error": False,
}


def values(q, k, v):
    return v.clone()


def test_a_function_is_measured_beside_fused_exact_attention():
    results = bench([values], **SMALL)
    assert {record.case.label for record in results.records} == {"exact", "values"}
    assert {record.status for record in results.records} == {"ok"}
    assert {record.case.kind for record in results.records} == {"time", "memory"}
    frame = results.to_pandas()
    assert (frame[frame.label == "values"].peak_bytes.dropna() == [2 * n * 8 * 4 for n in (16, 32)]).all()


@pytest.mark.parametrize("of", ["block", "encoder"])
def test_the_ceiling_and_fused_exact_attention_are_measured_beside_every_block(of, undrawn, tmp_path):
    results = bench([values], of=of, out=tmp_path, **SMALL)
    assert {record.case.label for record in results.records} == {CEILING, "exact", "values"}
    assert {(r.status, r.case.of, r.case.layers) for r in results.records} == {
        ("ok", of, 3 if of == "encoder" else None)
    }
    assert all(r.parameter_bytes for r in results.records if r.case.kind == "memory")
    again = bench([values], of=of, out=tmp_path, resume=True, **SMALL)
    assert again.records == results.records


@pytest.mark.parametrize("of", ["attention,block", "block,attention"])
def test_attention_and_block_are_measured_in_one_run_length_by_length(of):
    records = bench([values], of=of, **{**SMALL, "error": True}).records
    labels = {(record.case.of, record.case.label) for record in records}
    assert labels >= {("block", CEILING), *product(("attention", "output", "block"), ("exact", "values"))}
    assert {record.status for record in records} == {"ok"}
    assert [r.case.tokens for r in records] == sorted(r.case.tokens for r in records)


@pytest.mark.parametrize("of", ["attention", "block"])
def test_what_would_not_fit_into_memory_is_skipped_and_not_run(of, monkeypatch):
    monkeypatch.setattr("efficient_attn.studies.workload.available_bytes", lambda device: 16 * 2**30)
    called = []

    def measure(case, **settings):
        called.append(case.backend)
        return Record(case=case, status="error", reason="not measured here")

    monkeypatch.setattr("efficient_attn.measure.worker.measure", measure)
    results = bench(["exact-dense"], seq_lens="65536", of=of, device="cpu", isolate="none")
    dense = [record for record in results.records if record.case.backend == "exact-dense"]
    assert [(r.status, r.case.tokens) for r in dense] == [("skipped", 65536)] * 2
    # Scores and weights of 8 heads are 2 · 8 · 65536² · 4 bytes = 256 GiB.
    assert all("needs about 25" in record.reason for record in dense) and "exact-dense" not in called


def test_records_name_the_kernels_in_force(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert kernels_of_a_run() == {"cpu"}
    monkeypatch.setenv(VARIABLE, "torch")
    assert kernels_of_a_run() == {"torch"}


def kernels_of_a_run():
    return {record.kernels for record in bench(["window"], rounds=1, **SMALL).records}


def test_variants_of_an_option_are_measured_side_by_side():
    results = bench(["window"], options={"window": {"window": [3, 5]}}, **SMALL)
    assert {record.case.label for record in results.records} == {
        "exact",
        "window(window=3)",
        "window(window=5)",
    }


def test_causal_refusals_of_a_default_selection_are_records():
    results = bench(causal=True, **SMALL)
    refused = {record.case.backend for record in results.records if record.status == "unsupported"}
    assert refused == {"linformer"}
    states = [r.state_bytes for r in results.records if r.case.kind == "memory" and r.status == "ok"]
    assert states and all(states)


def test_out_gets_every_record_the_environment_and_the_plots(tmp_path):
    results = bench([values], out=tmp_path / "deep" / "run", **SMALL)
    files = {path.name for path in (tmp_path / "deep" / "run").iterdir()}
    assert files >= {
        "records.jsonl",
        "environment.json",
        "command.txt",
        "summary.csv",
        "time.svg",
        "memory.pdf",
    }
    lines = (tmp_path / "deep" / "run" / "records.jsonl").read_text().splitlines()
    # Every round of a time is a line.
    times = sum(json.loads(row)["kind"] == "time" for row in lines)
    assert len(results) == 8 and (times, len(lines)) == (4 * 4, 4 * 4 + 4)


def test_a_folder_of_another_run_is_refused_before_anything_is_measured(undrawn, tmp_path, monkeypatch):
    bench([values], out=tmp_path, **SMALL)
    monkeypatch.setattr("efficient_attn.studies.run.Engine", lambda *args, **named: pytest.fail("measured"))
    with pytest.raises(DataError, match=r"out: .* holds records of another run already"):
        bench([values], out=tmp_path, **SMALL)


def test_records_are_written_while_the_rest_is_measured(undrawn, tmp_path):
    """An interruption leaves every record that was complete, and says so."""
    calls = []

    def interrupting(q, k, v):
        calls.append(len(q))
        if q.shape[-2] == 32:
            signal.raise_signal(signal.SIGINT)
        return v.clone()

    results = bench([interrupting], out=tmp_path, **SMALL)
    assert results.interrupted
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert len(lines) == len(results) >= 4
    assert {json.loads(line)["tokens"] for line in lines} >= {16}


def test_auto_is_float32_on_the_cpu_and_settled_in_every_case():
    workload = settle(Workload(device="cpu"))
    assert (workload.dtype, workload.device, workload.threads) == ("float32", "cpu", torch.get_num_threads())
    points = points_of(find("bench").plan(seq_lens=(16,), device="cpu", error=False))
    assert {(one.case.dtype, one.case.device, one.case.inputs) for one in points} == {
        ("float32", "cpu", "gaussian")
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none():
    with pytest.raises(UnsupportedError, match="device cannot be 'cuda': this torch sees no CUDA device"):
        bench(device="cuda")


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_is_timed_with_events_and_its_allocator_is_asked():
    results = bench(["exact-dense"], device="cuda", seq_lens=(128, 256), budget_s=60)
    assert {record.status for record in results.records} == {"ok"}
    assert {r.memory_method for r in results.records if r.case.kind == "memory"} == {"cuda allocated"}


def test_decoding_times_one_token_after_the_state_of_all_before_it():
    results = bench(["window", values], decode=True, **SMALL)
    assert {(r.case.label, r.status) for r in results.records if r.case.kind == "time"} == {
        ("exact · decoded", "ok"),
        ("window · decoded", "ok"),
        ("values · decoded", "unsupported"),
    }
    states = {(r.case.backend, r.case.tokens): r.state_bytes for r in results.records if r.status == "ok"}
    # Keys and values of 8 float32 numbers in 2 heads, and one byte.
    assert [states["exact", n] for n in (16, 32)] == [2 * 2 * n * 8 * 4 + 1 for n in (16, 32)]
    assert all(r.case.causal for r in results.records)
    with pytest.raises(OptionError, match="decode is of attention alone"):
        bench(["window"], decode=True, backward=True, **SMALL)
