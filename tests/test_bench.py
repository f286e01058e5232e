"""`bench`: the yardstick, the workload, the files, and what it shows of calls."""

import json
from itertools import product

import pytest
import torch
from made_records import case

import efficient_attn as ea
from efficient_attn import bench
from efficient_attn.errors import OptionError, UnsupportedError
from efficient_attn.measure.record import Record, line, parse, replace
from efficient_attn.measure.variants import CEILING
from efficient_attn.ops.paths import VARIABLE
from efficient_attn.report.methods import how_measured
from efficient_attn.stats.estimates import by_clock, curves, speed_ups
from efficient_attn.studies.bench.tables import tables
from efficient_attn.studies.bench.view import plots, sentences

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


def test_attention_and_block_are_measured_in_one_run_length_by_length():
    records = bench([values], of="block,attention", **{**SMALL, "error": True}).records
    labels = {(record.case.of, record.case.label) for record in records}
    assert labels >= {("block", CEILING), *product(("attention", "output", "block"), ("exact", "values"))}
    assert {record.status for record in records} == {"ok"}
    assert [r.case.tokens for r in records] == sorted(r.case.tokens for r in records)


def test_records_name_the_kernels_in_force(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert kernels_of_a_run() == {"cpu"}
    monkeypatch.setenv(VARIABLE, "torch")
    assert kernels_of_a_run() == {"torch"}


def kernels_of_a_run():
    return {record.kernels for record in bench(["window"], rounds=1, **SMALL).records}


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


# Eleven calls of 1 to 11 ms; a record with less than four rounds has no interval.
SAMPLES = tuple(0.001 * n for n in (11, 3, 5, 1, 9, 7, 2, 10, 4, 8, 6))


def record(label="exact", factor=1.0, tokens=1024, *, measured=None, **fields):
    times_s = tuple(factor * time_s for time_s in SAMPLES)
    one = case("time", label, tokens, **{"batch": 2, **fields})
    return Record(case=one, times_s=times_s, round_sizes=(11,), measured=measured)


def on_gpu(label, factor, device_factor, **fields):
    made = record(label, factor, device="cuda", l2="cold", **fields)
    return replace(made, device_times_s=tuple(device_factor * time_s for time_s in SAMPLES))


def rows(table):
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_rows_have_percentiles_and_throughput():
    (row,) = ea.Results([record(factor=2)]).summary()
    assert row["time_p20_s"] == pytest.approx(0.006) and row["time_p80_s"] == pytest.approx(0.018)
    # Two sequences of 1024 tokens in 12 ms.
    assert row["time_s"] == row["time_p50_s"] and row["tokens_per_s"] == pytest.approx(2048 / 0.012)
    assert "device_time_s" not in row


def test_shares_are_operations_and_bytes_over_time_and_measured_rate():
    measured = {"flops": 3e9, "matmul_flops_per_s": 1e12, "moved_bytes": 6e6, "copy_bytes_per_s": 1e10}
    (time,) = tables([record(measured=measured), record("window", measured={"flops": 3e9})], {})
    exact, window = rows(time)
    # 3 GFLOP and 6 MB in 6 ms.
    assert (exact["of peak GEMM, %"], exact["of peak copy, %"]) == ("50", "10")
    assert (window["of peak GEMM, %"], window["of peak copy, %"]) == ("", "")
    assert "1000 GFLOP/s of a large matrix product (GEMM), 10.0 GB/s of a large copy" in " ".join(time.notes)
    (time,) = tables([record()], {})
    assert not any("of peak" in name for name in time.columns)


def test_a_gpu_has_a_second_pair_of_tables_a_sentence_and_a_plot_of_device_times():
    made = [on_gpu("exact", 1.0, 0.1), on_gpu("window", 1.0, 0.05)]
    time, device = tables(made, {})
    assert (time.title, device.title) == ("Time per call, ms", "Device time per call, ms")
    assert [row["1024"] for row in rows(device)] == ["0.6", "0.3"]
    assert [row["speed, exact 1×"] for row in rows(device)] == ["1×", "2×?"]
    assert "with a cold L2 cache" in " ".join(device.notes)
    latency, queued = sentences(made, {})
    assert latency.startswith("Speed at 1024 tokens") and "window 1.00×" in latency
    assert queued.startswith("Speed by device time at 1024 tokens") and "window 2.00×" in queued
    assert [*plots(made, {})] == ["time", "device-time"]
    assert "Device times are" in how_measured(made, {})
    assert "Device times are" not in how_measured([record()], {})
    assert ea.Results(made).summary()[0]["device_time_s"] == pytest.approx(0.0006)


def test_a_record_keeps_device_times_and_reads_as_eager_without_the_fields_of_this_version():
    made = on_gpu("exact", 1.0, 0.1)
    assert parse(line(made).encode(), "here") == made
    older = line(record()).replace(', "execution": null, "l2": null', "")
    assert "execution" not in older and parse(older.encode(), "here") == record()


def test_compiled_calls_are_compared_with_exact_compiled():
    made = [
        record("exact", 1.0),
        record("window", 0.5),
        record("exact · compiled", 0.8, backend="exact", execution="compiled"),
        record("window · compiled", 0.2, backend="window", execution="compiled"),
    ]
    found = {row.label: row.last.median for row in speed_ups(curves(made, "time_s"))}
    assert found == {"window": pytest.approx(2), "window · compiled": pytest.approx(4)}
    assert any("compared with exact compiled or replayed" in note for note in tables(made, {})[0].notes)
    assert [*by_clock(made)] == ["time"]
