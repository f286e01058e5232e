"""`bench`: the yardstick, the workload, the files, errors as measured, and what it shows of calls."""

import os
import runpy
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from study_points import points_of, study
from synthetic_records import case

import efficient_attn as ea
from efficient_attn import bench
from efficient_attn.errors import OptionError
from efficient_attn.measure import calls
from efficient_attn.measure.accuracy import error_of_case, sampled_queries
from efficient_attn.measure.inputs import Activations, NamedInputs, sample, write_given
from efficient_attn.measure.record import Record, replace
from efficient_attn.measure.variants import CEILING
from efficient_attn.ops.paths import VARIABLE
from efficient_attn.ops.softmax.definition import softmax_attention
from efficient_attn.runs.study import Run, Settled
from efficient_attn.stats.estimates import curves, speed_ups
from efficient_attn.studies.bench.comparison import comparisons
from efficient_attn.studies.bench.tables import tables
from efficient_attn.studies.bench.view import plots, sentences

# A run without background load.
UNDISTURBED = Run(Settled())

pytestmark = pytest.mark.usefixtures("hasty")

SHAPE = {"num_heads": 2, "head_dim": 8, "isolate": "none"}
SMALL = {"seq_lens": (16, 32), "budget_s": 3600, "error": False, **SHAPE}


def values(q, k, v):
    return v.clone()


@pytest.mark.parametrize("of", ["block", pytest.param("encoder", marks=pytest.mark.slow)])
def test_the_ceiling_and_fused_exact_attention_are_measured_beside_every_block(of, undrawn, tmp_path):
    results = bench([values], of=of, out=tmp_path, **SMALL)
    assert {record.case.label for record in results.records} == {CEILING, "exact", "values"}
    assert {(r.status, r.case.of, r.case.layers) for r in results.records} == {
        ("ok", of, 3 if of == "encoder" else None)
    }
    assert all(r.parameter_bytes for r in results.records if r.case.kind == "memory")
    again = bench([values], of=of, out=tmp_path, resume=True, **SMALL)
    assert again.records == results.records


@pytest.mark.slow
def test_attention_and_block_are_measured_in_one_run_length_by_length():
    records = bench([values], of="block,attention", **{**SMALL, "error": True}).records
    labels = {(record.case.of, record.case.label) for record in records}
    assert labels >= {("block", CEILING), *product(("attention", "output", "block"), ("exact", "values"))}
    assert {record.status for record in records} == {"ok"}
    assert [r.case.tokens for r in records] == sorted(r.case.tokens for r in records)


def test_records_name_the_kernels_in_force(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    for kernels in ("cpu", "torch"):
        assert {record.kernels for record in bench(["window"], rounds=1, **SMALL).records} == {kernels}
        monkeypatch.setenv(VARIABLE, "torch")


@pytest.mark.slow
def test_causal_refusals_of_a_default_selection_are_records():
    results = bench(causal=True, **SMALL)
    refused = {record.case.backend for record in results.records if record.status == "unsupported"}
    assert refused == {"linformer", "window-clusters"}
    states = [r.state_bytes for r in results.records if r.case.kind == "memory" and r.status == "ok"]
    assert states and all(states)


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_is_timed_with_events():
    results = bench(["exact-dense"], device="cuda", seq_lens=(128, 256), budget_s=60)
    assert {record.status for record in results.records} == {"ok"}


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


def samples(factor):
    """Eleven calls of 1 to 11 times a factor, in ms."""
    return tuple(0.001 * factor * n for n in (11, 3, 5, 1, 9, 7, 2, 10, 4, 8, 6))


def record(label="exact", factor=1.0, **fields):
    """A time of a single round, which has no interval."""
    return Record(
        case=case("time", label, 1024, batch=2, **fields), times_s=samples(factor), round_sizes=(11,)
    )


def test_rows_have_percentiles_and_throughput():
    (row,) = ea.Results([record(factor=2)]).summary()
    assert row["time_p20_s"] == pytest.approx(0.006) and row["time_p80_s"] == pytest.approx(0.018)
    # Two sequences of 1024 tokens in 12 ms.
    assert row["time_s"] == row["time_p50_s"] and row["tokens_per_s"] == pytest.approx(2048 / 0.012)
    assert "device_time_s" not in row


def test_a_gpu_has_a_second_pair_of_tables_a_sentence_and_a_plot_of_device_times():
    made = [
        replace(record(label, device="cuda", l2="cold"), device_times_s=samples(factor))
        for label, factor in (("exact", 0.1), ("window", 0.05))
    ]
    time, device = tables(made)
    assert (time.title, device.title) == ("Time per call, ms", "Device time per call, ms")
    columns = dict(zip(device.columns, zip(*device.rows, strict=True), strict=True))
    assert (columns["1024"], columns["speed, exact 1×"]) == (("0.6", "0.3"), ("1×", "2×?"))
    assert "with a cold L2 cache" in " ".join(device.notes)
    latency, queued = sentences(made, 0.1, UNDISTURBED)
    assert latency.startswith("Speed at 1024 tokens") and "window 1×?" in latency
    assert queued.startswith("Speed by device time at 1024 tokens") and "window 2×?" in queued
    assert [*plots(made)] == ["time", "device-time"]
    assert ea.Results(made).summary()[0]["device_time_s"] == pytest.approx(0.0006)


def test_decoding_is_compared_with_decoding_in_several_runs():
    made = [
        record("exact", 1.0),
        record("window", 0.5),
        record("exact · decoded", 0.8, backend="exact", execution="decoded"),
        record("window · decoded", 0.2, backend="window", execution="decoded"),
    ]
    found = {row.label: row.last.median for row in speed_ups(curves(made, "time_s"))}
    assert found == {"window": pytest.approx(2), "window · decoded": pytest.approx(4)}


def test_on_a_gpu_times_have_a_cache(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    options = {"of": "attention,block", "error": False, "device": "cuda", "dtype": "bfloat16"}
    points = points_of(study("bench", ["window"], seq_lens=(8, 16), **options))
    assert {(point.case.kind, point.case.l2) for point in points} == {("time", "cold"), ("memory", None)}


TOTAL = """
import os, zlib


def bits(q, k, v):
    # Each timed call has other values, of the same signs in q and k.
    return zlib.crc32(b"".join((x > 0).contiguous().numpy().tobytes() for x in (q, k)))


def total(q, k, v):
    with open("seen.txt", "a") as file:
        file.write(f"{os.getpid()} {bits(q, k, v)} {q.shape[-2]}\\n")
    return v
"""


@pytest.mark.parametrize("isolate", ["none", pytest.param("reuse", marks=pytest.mark.slow)])
def test_every_backend_is_measured_on_the_same_tensors_as_its_error(isolate, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(TOTAL)
    ea.bench(["own.py:total"], inputs="encoder", layers=[0, 1], seq_lens=24, rounds=1, isolate=isolate)
    rows = [line.split() for line in Path("seen.txt").read_text().splitlines()]
    # A process on trial made the first call of the file, on fewer tokens.
    pids, bits = zip(*(row[:2] for row in rows if row[2] == "24"), strict=True)
    assert len(bits) > 4 and (str(os.getpid()) in pids) == (isolate == "none")
    bits_of = runpy.run_path("own.py")["bits"]
    assert set(bits) == {str(bits_of(*(x[..., :24, :] for x in sample(layer)))) for layer in (0, 1)}


def test_what_is_timed_has_the_scale_of_the_inputs(tmp_path):
    q, k, v = (tensor[..., :8, :] for tensor in sample(1))
    write_given(tmp_path / "qkv.safetensors", NamedInputs("", Activations(q, k, v), 0.5))
    timed = calls.prepare(
        case("time", "exact", 8, num_heads=12, head_dim=32, inputs="encoder(layer=1)"),
        "exact",
        str(tmp_path / "qkv.safetensors"),
    )
    torch.testing.assert_close(timed.call(), softmax_attention(q, k, v, scale=0.5, key_mask=None))


def test_errors_are_measured_on_all_layers_and_times_on_the_inputs_once():
    results = ea.bench(["window"], inputs="decoder", seq_lens=24, rounds=1, isolate="none")
    window = [record.case for record in results.records if record.case.backend == "window"]
    assert [(one.kind, one.inputs, one.causal, one.num_heads, one.num_kv_heads) for one in window] == [
        ("time", "decoder(layers=18,19)", True, 9, 3),
        ("error", "decoder(layer=18)", True, 9, 3),
        ("error", "decoder(layer=19)", True, 9, 3),
        ("memory", "decoder(layers=18,19)", True, 9, 3),
    ]
    assert {record.status for record in results.records} == {"ok"}


def test_without_inputs_times_are_of_gaussian_draws_and_errors_of_a_model():
    results = ea.bench([values], seq_lens=(16, 24), rounds=1, **SHAPE)
    kinds = {(record.case.kind, record.case.inputs, record.case.num_heads) for record in results.records}
    layers = {("error", f"encoder(layer={layer})", 12) for layer in (0, 1, 5)}
    assert kinds == {("time", "gaussian", 2), ("memory", "gaussian", 2), *layers}
    assert "at 24 tokens (errors on encoder, layers 0, 1, 5, 12 heads of 32;" in results.sentences()[0]
    assert {"time", "memory", "error", "comparison"} == {*results.plots()}


@pytest.mark.parametrize(
    ("inputs", "settings", "tokens", "layers"),
    [
        ("decoder", {"seq_lens": (256, 2048)}, (256, 2048), (18, 19)),
        ("decoder", {"seq_lens": (2048, 4096)}, (2048, 4096), (19,)),
        # Default lengths beyond the inputs are left out.
        ("encoder", {}, (256, 512), (0, 1, 5)),
    ],
)
def test_all_lengths_of_one_input_have_the_same_layers(inputs, settings, tokens, layers):
    points = points_of(study("bench", ["window"], inputs=inputs, **settings))
    errors = {(point.case.inputs, point.case.tokens) for point in points if point.case.kind == "error"}
    assert errors == {(f"{inputs}(layer={layer})", length) for layer in layers for length in tokens}


@pytest.mark.parametrize(("tokens", "causal"), [(40, False), (40, True), (1500, True)])
def test_the_error_is_that_of_the_definition_on_the_compared_queries(tmp_path, tokens, causal):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, tokens, 8), *torch.randn(2, 1, 2, tokens, 8)
    write_given(tmp_path / "qkv.safetensors", NamedInputs("x", Activations(3 * q, k, v), 0.5))
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "inputs": "x", "causal": causal}
    record = error_of_case(
        case("error", "uniform attention", tokens, of="output", **shape),
        None,
        str(tmp_path / "qkv.safetensors"),
    )
    keys, values = (x.double().repeat_interleave(2, dim=1) for x in (k, v))
    visible = torch.ones(tokens, tokens).tril(0 if causal else tokens).bool()
    weights = (1.5 * q.double() @ keys.mT).masked_fill(~visible, -torch.inf).softmax(-1)
    mean = visible.double() @ values / visible.sum(-1, keepdim=True)
    rows = sampled_queries(tokens, 0) if tokens > 1024 else torch.arange(tokens)
    assert record.compared_queries == (256 if tokens > 1024 else None)
    squares, norms = (x[:, :, rows].square() for x in (mean - weights @ values, weights @ values))
    assert record.output_relative_error == pytest.approx(float((squares.sum() / norms.sum()).sqrt()))
    assert record.output_mse == pytest.approx(float(squares.mean()))


def test_the_compared_queries_lie_in_equal_parts_of_the_sequence():
    rows = sampled_queries(4096, 3)
    assert (rows // 16).tolist() == list(range(256)) and not (rows % 16 == 0).all()
    assert (rows != sampled_queries(4096, 4)).any()


def test_layers_of_unlike_shapes_are_refused_until_one_is_named(tmp_path):
    path = tmp_path / "unlike.safetensors"
    shapes = {f"layer.{n}.{x}": (n + 1, 8, 4) for n in (0, 1) for x in "qkv"}
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, path)
    with pytest.raises(OptionError, match="differ in shape or causality; save one alone"):
        ea.bench(["exact"], inputs=path, seq_lens=5)
    results = ea.bench(["exact"], layers=[1], rounds=1, isolate="none", inputs=path, seq_lens=8)
    assert {record.case.num_heads for record in results.records} == {2}


def test_a_backend_that_fails_on_the_first_layer_is_measured_on_no_other():
    def unsteady(q, k, v):
        if q.shape[1] == 12:
            raise RuntimeError("it broke here")
        return v.clone()

    results = ea.bench([unsteady], seq_lens=16, rounds=1, **SHAPE)
    errors = [r for r in results.records if r.case.label == "unsteady" and r.case.kind == "error"]
    assert [record.status for record in errors] == ["error"]
    assert any("unsteady: error: RuntimeError: it broke here" in note for note in results.tables()[0].notes)


ENCODER = {"inputs": "encoder", "layers": [1], "seq_lens": 24, "rounds": 1, "isolate": "none"}


def test_causal_errors_are_those_against_causal_attention():
    backends = ["window", "performer-oprf"]
    results = ea.bench(backends, causal=True, options={"window": {"window": [24]}}, **ENCODER)
    assert {(record.case.causal, record.status) for record in results.records} == {(True, "ok")}
    errors = {r.case.backend: r.output_relative_error for r in results.records if r.case.kind == "error"}
    # A window as long as the sequence is exact; uniform attention is not.
    near = {name for name, error in errors.items() if error < 1e-4}
    calibrated = {r.calibrated_on for r in results.records if r.case.backend == "performer-oprf"}
    assert calibrated == {"the inputs measured"}
    assert near == {"exact", "window"} and {*errors} > {"uniform attention"} | near
    (one,) = comparisons(results.records)
    assert {row.backend for row in one.contenders} == {*errors} and "causal" in results.sentences()[0]


def test_backward_and_batch_are_those_of_times_and_memory_and_are_named():
    results = ea.bench(["window"], backward=True, batch=2, **ENCODER)
    assert {(r.case.kind, r.case.backward, r.case.batch, r.status) for r in results.records} == {
        ("error", False, 1, "ok"),
        ("time", True, 2, "ok"),
        ("memory", True, 2, "ok"),
    }
    assert "batch 2, forward and backward" in results.tables()[0].title
