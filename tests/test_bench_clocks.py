"""What `bench` shows of calls: percentiles, throughput, shares of ceilings, device times, executions."""

import pytest
from made_records import case

import efficient_attn as ea
from efficient_attn.measure.record import Record, replace
from efficient_attn.measure.records import line, parse
from efficient_attn.report.methods import how_measured
from efficient_attn.stats.curves import by_clock, curves
from efficient_attn.studies.bench.crossover import gains
from efficient_attn.studies.bench.tables import tables
from efficient_attn.studies.bench.view import plots, sentences

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


def test_rows_have_percentiles_and_throughput_and_no_share_of_a_rate_that_was_not_measured():
    (time,) = tables([record(tokens=512), record(factor=2)], {})
    assert time.title == "Time per call, ms" and not any("% of peak" in name for name in time.columns)
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
    assert (exact["% of peak GEMM"], exact["% of peak copy"]) == ("50.0", "10.0")
    assert (window["% of peak GEMM"], window["% of peak copy"]) == ("", "")
    assert "1000 GFLOP/s of a large matrix product (GEMM), 10.0 GB/s of a large copy" in time.notes[-1]


def test_a_gpu_has_a_second_pair_of_tables_a_sentence_and_a_plot_of_device_times():
    made = [on_gpu("exact", 1.0, 0.1), on_gpu("window", 1.0, 0.05)]
    time, device = tables(made, {})
    assert (time.title, device.title) == ("Time per call, ms", "Device time per call, ms")
    assert [row["1024"] for row in rows(device)] == ["0.6", "0.3"]
    assert [row["speed, exact = 1"] for row in rows(device)] == ["1", "2.00x"]
    assert "with a cold L2 cache" in device.notes[-1]
    latency, queued = sentences(made, {})
    assert latency.startswith("Speed, exact = 1") and "window 1.00x" in latency
    assert queued.startswith("Speed by device time, exact = 1") and "window 2.00x" in queued
    assert [*plots(made, {})] == ["time", "device-time"]
    assert "Device times are" in how_measured(made, {})
    assert "Device times are" not in how_measured([record()], {})
    assert ea.Results(made).summary()[0]["device_time_s"] == pytest.approx(0.0006)


def test_a_record_keeps_device_times_and_reads_as_eager_without_the_fields_of_this_version():
    made = on_gpu("exact", 1.0, 0.1)
    assert parse(line(made).encode(), "here") == made
    older = line(record()).replace(', "execution": null, "l2": null', "")
    assert "execution" not in older and parse(older.encode(), "here") == record()
    broken = line(made).replace('"device_times_s": [0.0011', '"device_times_s": [null')
    assert len(parse(broken.encode(), "here").device_times_s) == len(SAMPLES) - 1


def test_compiled_calls_are_compared_with_exact_compiled():
    made = [
        record("exact", 1.0),
        record("window", 0.5),
        record("exact · compiled", 0.8, backend="exact", execution="compiled"),
        record("window · compiled", 0.2, backend="window", execution="compiled"),
    ]
    found = {gain.label: gain.ratio.median for gain in gains(curves(made, "time_s"))}
    assert found == {"window": pytest.approx(2), "window · compiled": pytest.approx(4)}
    assert any("compared with exact compiled or replayed" in note for note in tables(made, {})[0].notes)
    assert [*by_clock(made)] == ["time"]
