"""`bench`: points of a default run, threads, errors on layers, and times of calls."""

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from study_points import points_of, study
from synthetic_records import case

import efficient_attn as ea
from efficient_attn import bench
from efficient_attn.errors import OptionError
from efficient_attn.measure.accuracy import error_of_case, sampled_queries
from efficient_attn.measure.inputs import Activations, NamedInputs, sample, write_given
from efficient_attn.measure.record import Record, replace
from efficient_attn.measure.variants import CEILING
from efficient_attn.ops.paths import VARIABLE
from efficient_attn.runs.header import header, requested
from efficient_attn.runs.study import Run, Settled
from efficient_attn.stats.estimates import curves
from efficient_attn.stats.speeds import speed_ups
from efficient_attn.studies.bench import Bench

UNDISTURBED = Run(Settled())

pytestmark = pytest.mark.usefixtures("hasty")

SHAPE = {"num_heads": 2, "head_dim": 8, "isolate": "none"}
SMALL = {"seq_lens": (16, 32), "budget_s": 3600, "error": False, **SHAPE}


def values(q, k, v):
    return v.clone()


@pytest.mark.parametrize("of", ["block,attention", pytest.param("encoder", marks=pytest.mark.slow)])
def test_the_ceiling_and_fused_exact_attention_are_measured_beside_every_block(of, undrawn, tmp_path):
    records = bench([values], of=of, out=tmp_path, **SMALL).records
    calls = {(record.status, record.case.of, record.case.layers, record.case.label) for record in records}
    stacks = {"block": None, "encoder": 3, "attention": None}
    subjects = [("ok", subject, stacks[subject]) for subject in of.split(",")]
    assert calls == {
        (*subjects[0], CEILING),
        *((*x, label) for x in subjects for label in ("exact", "values")),
    }
    assert all(
        x.parameter_bytes for x in records if x.case.kind == "memory" and x.case.of in ("block", "encoder")
    )
    lengths = [record.case.tokens for record in records if record.case.kind == "time"]
    assert lengths == sorted(lengths)
    assert bench([values], of=of, out=tmp_path, resume=True, **SMALL).records == records


def test_records_name_the_kernels_in_force(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    for kernels in ("cpu", "torch"):
        assert {record.kernels for record in bench(["window"], rounds=1, **SMALL).records} == {kernels}
        monkeypatch.setenv(VARIABLE, "torch")


@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        ({}, ("flash", "math", "flex")),
        ({"backward": True}, ("flash", "math")),
        ({"dtype": "float64"}, ("flash", "math")),
    ],
)
def test_all_kernels_are_those_that_serve_the_calls(options, kernels):
    settings = {"exact": {"kernel": ["all"]}}
    points = points_of(study("bench", ["exact"], options=settings, seq_lens=16, **options, **SHAPE))
    labels = [f"exact(kernel={kernel})" for kernel in kernels]
    assert [*dict.fromkeys(x.case.label for x in points if x.case.kind == "time")] == ["exact", *labels]


def test_two_kernels_differ_by_what_float64_says(tmp_path):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 300, 8)
    write_given(tmp_path / "qkv.safetensors", NamedInputs("x", Activations(q, k, v), 0.5))
    shape = {"of": "output", "num_heads": 2, "head_dim": 8, "inputs": "x"}
    exact = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), scale=0.5)
    errors = {}
    for kernel in ("flash", "math"):
        options = {"dropout": 0.0, "compute_dtype": None, "kernel": kernel}
        named = replace(
            case("error", f"exact(kernel={kernel})", 300, **shape), backend="exact", options=options
        )
        out = ea.build("exact", head_dim=8, scale=0.5, kernel=kernel)(q, k, v)
        errors[kernel] = error_of_case(named, None, str(tmp_path / "qkv.safetensors")).output_relative_error
        assert errors[kernel] == pytest.approx(float((out - exact).norm() / exact.norm()), rel=1e-6)
    assert errors["flash"] != errors["math"] and max(errors.values()) < 1e-6


@pytest.mark.slow
def test_causal_refusals_of_a_default_selection_are_records():
    results = bench(causal=True, **SMALL)
    refused = {record.case.backend for record in results.records if record.status == "unsupported"}
    assert refused == {"linformer", "window-clusters"}
    states = [r.state_bytes for r in results.records if r.case.kind == "memory" and r.status == "ok"]
    assert states and all(states)


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
    records = [
        replace(record(label, device="cuda", l2="cold"), device_times_s=samples(factor))
        for label, factor in (("exact", 0.1), ("window", 0.04))
    ]
    speeds, time, device = Bench().view("tables", records, UNDISTURBED)
    assert time.title.endswith("; time per call, ms") and device.title.endswith("; device time per call, ms")
    assert [table.detail for table in (speeds, time, device)] == [False, True, False]
    assert [row[1] for row in device.rows] == ["0.6", "0.24"]
    assert "with a cold L2 cache" in " ".join(device.notes)
    latency, queued = Bench().view("sentences", records, UNDISTURBED)
    assert latency == "2 heads of 8, float32, cuda, batch 2: window (1.0×? at 1024 tokens)."
    assert queued == f"Speed by device time ({speeds.title}), exact 1×: window 2.5×?."
    assert [*Bench().view("plots", records, UNDISTURBED)] == ["time", "device-time"]
    assert ea.Results(records).summary()[0]["device_time_s"] == pytest.approx(0.0006)


def test_decoding_is_compared_with_decoding_in_several_runs():
    records = [
        record("exact", 1.0),
        record("exact(compute_dtype=bfloat16)", 0.5, options={"compute_dtype": "bfloat16"}),
        record("window", 0.5),
        record("exact · decoded", 0.8, backend="exact", execution="decoded"),
        record("window · decoded", 0.2, backend="window", execution="decoded"),
    ]
    speeds = {row.label: row.last.median for row in speed_ups(curves(records, "time_s"))}
    assert speeds.pop("exact(compute_dtype=bfloat16)") == pytest.approx(2)
    assert speeds == {"window": pytest.approx(2), "window · decoded": pytest.approx(4)}


def test_a_decided_speed_gets_no_further_rounds(monkeypatch):
    def fixed(case, **settings):
        times_s = (1.0 if case.label == "exact" else 0.5,)
        return Record(case=case, times_s=times_s, round_sizes=(1,))

    monkeypatch.setattr("efficient_attn.measure.worker.measure", fixed)
    results = ea.bench(["window"], inputs="gaussian", seq_lens=16, isolate="none", threads=1)
    assert {len(record.times_s) for record in results.records if record.case.kind == "time"} == {4}


def test_on_a_gpu_times_have_a_cache(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    options = {"of": "attention,block", "error": False, "device": "cuda", "dtype": "bfloat16"}
    points = points_of(study("bench", ["window"], seq_lens=(8, 16), **options))
    assert {(point.case.kind, point.case.l2) for point in points} == {("time", "cold"), ("memory", None)}


@pytest.mark.parametrize("isolate", ["none", pytest.param("reuse", marks=pytest.mark.slow)])
def test_errors_are_on_the_first_tokens_of_each_layer(isolate, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("def values(q, k, v):\n    return v.clone()\n")
    small = {"layers": [0, 1], "seq_lens": 24, "rounds": 1, "isolate": isolate}
    records = ea.bench(["own.py:values"], inputs="encoder", **small).records
    errors = {x.case.inputs: x.output_relative_error for x in records if x.case.label == "own.py:values"}
    for layer in (0, 1):
        q, k, v = (x[..., :24, :].double() for x in sample(layer))
        exact = F.scaled_dot_product_attention(q, k, v)
        assert errors[f"encoder(layer={layer})"] == pytest.approx(float((v - exact).norm() / exact.norm()))


@pytest.mark.parametrize(
    "shape", [{"inputs": "gaussian"}, {"head_dim": 8}, {"of": "block"}, {"decode": True}]
)
def test_calls_of_another_shape_or_subject_than_a_model_have_no_errors(shape):
    points = points_of(study("bench", ["window"], seq_lens=16, threads=1, **shape))
    assert {(x.case.kind, x.case.inputs) for x in points} == {(x, "gaussian") for x in ("time", "memory")}


@pytest.mark.parametrize("half", [False, True])
def test_a_default_run_has_backends_for_all_questions_on_the_shapes_of_both_models(half, monkeypatch):
    instructions = "amx_bf16" if half else "avx512_bf16"
    monkeypatch.setattr("efficient_attn.ops.paths.bfloat16_instructions", lambda: instructions)
    points = points_of(study("bench", threads=1))
    shapes = Counter((x.case.num_heads, x.case.num_kv_heads) for x in points if x.case.kind == "time")
    assert shapes == {(12, None): 4 * (9 + half), (9, 3): 4 * (8 + half) + 2}
    labels = {causal: {x.case.label for x in points if x.case.causal == causal} for causal in (False, True)}
    assert labels[True] == labels[False] | {"block-topk"} != labels[False]
    assert ("exact(compute_dtype=bfloat16)" in labels[False]) == half
    assert {x.case.tokens for x in points if x.case.kind == "memory"} == {512, 1024, 2048, 4096}
    assert {x.case.tokens for x in points if x.case.kind == "error" and not x.case.causal} == {512}


def test_all_backends_have_calls_on_both_shapes():
    points = points_of(study("bench", "all", seq_lens=512, threads=1))
    calls = Counter(point.case.label for point in points if point.case.kind == "time")
    assert calls == dict.fromkeys(ea.list_backends(), 2)


def test_threads_are_the_free_cores_and_a_resumed_run_takes_them_again(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    for name, count in (("usable_cores", 4), ("free_cores", 3)):
        monkeypatch.setattr(f"efficient_attn.runs.workload.{name}", lambda count=count: count)
    plan = study("bench", ["window"], **SHAPE)
    assert (plan.settled.threads, plan.settled.free_cores) == (3, "3 of 4 cores free")
    assert requested(type(plan), {}, header(plan), tmp_path).threads == 3


@pytest.mark.parametrize(
    ("inputs", "lengths", "errors"),
    [
        ("decoder", (256, 2048), {18: (256, 2048), 19: (256, 2048)}),
        ("decoder", (2048, 4096, 8192), {18: (2048,), 19: (2048, 4096)}),
        # Inputs have errors at their own length if all others are longer.
        ("encoder", (1024,), dict.fromkeys((0, 1, 5), (512,))),
    ],
)
def test_errors_are_at_lengths_that_the_inputs_have(inputs, lengths, errors):
    points = points_of(study("bench", ["window"], inputs=inputs, seq_lens=lengths, threads=1))
    places = {(point.case.inputs, point.case.tokens) for point in points if point.case.kind == "error"}
    assert places == {(f"{inputs}(layer={layer})", n) for layer, tokens in errors.items() for n in tokens}
    assert {point.case.tokens for point in points if point.case.kind == "time"} == {*lengths}


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

    results = ea.bench([unsteady], inputs="encoder", seq_lens=16, rounds=1, isolate="none")
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
    assert "Within 10 % output error" in results.sentences()[0]


def test_backward_and_batch_are_those_of_times_and_memory_and_are_named():
    results = ea.bench(["window"], backward=True, batch=2, **ENCODER)
    assert {(r.case.kind, r.case.backward, r.case.batch, r.status) for r in results.records} == {
        ("error", False, 1, "ok"),
        ("time", True, 2, "ok"),
        ("memory", True, 2, "ok"),
    }
    assert "batch 2, forward and backward" in results.tables()[0].title
