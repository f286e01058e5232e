"""Comparisons: one table by time, the front, and a sentence that follows from them, whichever it is."""

import os
import re

import pytest
import torch
from made_records import case
from planned import answered_by, points_of

import efficient_attn as ea
from efficient_attn.errors import OptionError
from efficient_attn.measure import calls
from efficient_attn.measure.accuracy import error_of_case, sampled_queries
from efficient_attn.measure.inputs import Activations, Subject, sample, write_given
from efficient_attn.measure.record import Record, replace
from efficient_attn.measure.variants import joint_name, single_names
from efficient_attn.ops.softmax.definition import softmax_attention
from efficient_attn.studies import find
from efficient_attn.studies.bench.comparison import comparisons
from efficient_attn.studies.bench.tables import tables
from efficient_attn.studies.bench.view import sentences
from efficient_attn.studies.engine import Engine
from efficient_attn.studies.results import Results, read
from efficient_attn.studies.run_folder import Store

pytestmark = pytest.mark.usefixtures("hasty")

PLACE = {"inputs": "encoder(layer=1)", "num_heads": 12, "head_dim": 32}
# Nine calls within 1 % of each other: intervals that lie apart wherever times differ by more.
SPREAD = [1 + step / 1000 for step in range(-4, 5)]


def measured(label, error, seconds=None, peak=None, spread=SPREAD, **changes):
    """The records of one contender; what is None was not measured."""
    given = PLACE | changes
    made = []
    if error is not None:
        draws = {
            "output_relative_error": error,
            "output_relative_error_draws": (error,),
            "output_mse": error**2 / 2,
        }
        made.append(Record(case=case("error", label, 512, of="output", **given), **draws))
    if seconds is not None:
        times_s = tuple(seconds * one for one in spread)
        rounds = (1,) * len(times_s)
        made.append(Record(case=case("time", label, 512, **given), times_s=times_s, round_sizes=rounds))
    if peak is not None:
        made.append(Record(case=case("memory", label, 512, **given), peak_bytes=peak))
    return made


EXACT = measured("exact", 3e-7, 0.010, 4096)
MEAN = measured("uniform attention", 0.8, 0.001, 1024)
WINDOW = measured("window", 0.3, 0.004, 2048)
DENSE = measured("exact-dense", 2e-7, 0.030, 1 << 20)
UNTIMED = measured("untimed", 0.2)
STUDY = {"study": "bench"}
ALL = [*EXACT, *MEAN, *WINDOW, *DENSE, *UNTIMED]


def sentence(records, max_error=0.1):
    (told,) = sentences(records, {"max_error": max_error})
    return told


def test_a_comparison_on_a_gpu_has_device_times_and_speeds_by_them():
    def on_gpu(label, error, seconds, device_s):
        error, timed = measured(label, error, seconds, device="cuda", l2=None)
        times_s = tuple(device_s * one for one in SPREAD)
        return [error, replace(timed, case=replace(timed.case, l2="cold"), device_times_s=times_s)]

    (table,) = tables([*on_gpu("exact", 3e-7, 0.010, 0.008), *on_gpu("window", 0.3, 0.010, 0.002)], {})
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert rows["exact"]["device speed, exact = 1"] == "1"
    speeds = [rows["window"][name].split()[0] for name in ("speed, exact = 1", "device speed, exact = 1")]
    assert speeds == ["1.00x", "4.00x"]
    assert rows["window"]["device time, ms"].startswith("2.0")
    assert any("with a cold L2 cache" in note for note in table.notes)
    assert not [name for name in tables(ALL, {})[0].columns if "device" in name]


def test_the_sentence_names_what_is_both_the_fastest_first():
    both = [*measured("slow", 0.05, 0.008), *measured("quick", 0.09, 0.005)]
    told = sentence([*ALL, *both])
    assert (
        "both within 10 % of exact and faster: quick (error 0.09, 2.00x as fast), slow (error 0.05, 1.25x"
        in told
    )
    assert "is the answer" not in told


def test_the_sentence_follows_the_error_that_was_asked_about():
    assert "both within 30 % of exact and faster: window" in sentence(ALL, 0.3)
    assert "nothing is both within 29.9 %" in sentence(ALL, 0.299)


def test_yardsticks_are_never_the_answer():
    told = sentence([*EXACT, *measured("uniform attention", 0.01, 0.001)], 0.5)
    assert told.endswith("nothing but exact is within 50 % of it, whatever the times.")


def test_without_exact_attention_the_sentence_judges_nothing():
    assert "exact attention was not measured" in sentence([*MEAN, *WINDOW])


def test_error_and_cost_of_different_lengths_are_never_joined():
    longer = Record(case=case("time", "window", 1024, **PLACE), times_s=(0.1,))
    found = comparisons([*EXACT, *WINDOW[:1], longer])
    (window,) = (one for one in found[0].contenders if one.label == "window")
    assert len(found) == 1 and window.time_s is None


def test_what_failed_stands_in_the_notes_with_its_reason():
    failed = Record(case=case("error", "mine", 512, of="output", **PLACE), status="error", reason="it broke")
    (table,) = tables([*ALL, failed], {})
    assert ("mine", "–", "–", "error", "–", "–", "") in table.rows and "mine: error: it broke" in table.notes


def test_the_front_is_what_nothing_beats_in_both():
    heavy = measured("heavy", 0.2, 0.006, 1 << 22)
    beaten = measured("beaten", 0.31, 0.0041, 2049)
    (one,) = comparisons([*ALL, *heavy, *beaten])
    # exact-dense has a smaller error than exact, but both are rounding, and it costs more.
    assert [row.label for row in one.front("time_s")] == ["uniform attention", "window", "heavy", "exact"]
    assert [row.label for row in one.front("peak_bytes")] == ["uniform attention", "window", "exact"]


def test_two_that_are_equal_in_both_are_both_on_the_front():
    (one,) = comparisons([*EXACT, *measured("one", 0.3, 0.004), *measured("other", 0.3, 0.004)])
    assert {row.label for row in one.front("time_s")} == {"one", "other", "exact"}


def test_hostile_names_are_harmless_in_figure_table_and_page(tmp_path):
    name = "$\\frac{<script>\x1b[2J"
    results = Results([*ALL, *measured(name, 0.4, 0.002, 99, backend=name)], environment=STUDY)
    results.save(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page and "\x1b" not in page
    assert {f"comparison.{kind}" for kind in ("png", "svg", "pdf")} <= {
        path.name for path in tmp_path.iterdir()
    }
    assert not results.notes


def test_what_was_asked_about_is_kept_with_the_run_and_drawn_again(tmp_path):
    Results(ALL, environment={**STUDY, "max_error": 0.3}).save(tmp_path)
    assert "both within 30 %" in read(tmp_path).sentences()[0]
    assert "both within 30 %" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("nonsense", ["much", -1, None, True, 1e999])
def test_a_nonsensical_error_in_a_strangers_environment_is_the_default(nonsense):
    assert "within 10 %" in Results(ALL, environment={**STUDY, "max_error": nonsense}).sentences()[0]


def test_every_backend_is_measured_on_the_same_tensors_as_its_error():
    seen = []

    def mine(q, k, v):
        seen.append((q.clone(), k.clone(), v.clone()))
        return v

    results = ea.bench([mine, "exact"], inputs="encoder", layers=[1], seq_lens=40, rounds=1)
    first = [tensor[..., :40, :] for tensor in sample(1)]
    # The error, the warm-up and samples of the time, two calls for the memory.
    assert len(seen) > 4
    assert all(torch.equal(one, other) for call in seen for one, other in zip(call, first, strict=True))
    frame = results.to_pandas(constant=True)
    assert set(frame["tokens"]) == {40} and set(frame["inputs"]) == {"encoder(layer=1)"}
    assert any("Nothing was isolated" in note for note in results.notes)


@pytest.mark.slow
def test_costs_are_taken_in_another_process_on_the_same_tensors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        "import os, zlib\n\n"
        "def total(q, k, v):\n"
        "    bits = b''.join(x.contiguous().numpy().tobytes() for x in (q, k, v))\n"
        "    with open('seen.txt', 'a') as file:\n"
        "        file.write(f'{os.getpid()} {zlib.crc32(bits)} {q.shape[-2]}\\n')\n"
        "    return v\n"
    )
    ea.bench(["own.py:total"], inputs="encoder", layers=[1], seq_lens=24, rounds=1)
    lines = {tuple(line.split()) for line in (tmp_path / "seen.txt").read_text().splitlines()}
    # A third process made the first call of the file, on fewer tokens.
    measured = [line[:2] for line in lines if line[2] == "24"]
    assert {pid for pid, _ in measured}.isdisjoint({str(os.getpid())}) and len(
        {bits for _, bits in measured}
    ) == 1


def test_what_is_timed_has_the_scale_of_the_inputs(tmp_path):
    q, k, v = (tensor[..., :8, :] for tensor in sample(1))
    write_given(tmp_path / "qkv.safetensors", Subject("", Activations(q, k, v), 0.5))
    timed = calls.prepare(case("time", "exact", 8, **PLACE), "exact", str(tmp_path / "qkv.safetensors"))
    torch.testing.assert_close(timed.call(), softmax_attention(q, k, v, scale=0.5, key_mask=None))


def test_what_needs_calibration_is_calibrated_on_the_inputs_and_that_is_said():
    results = ea.bench(
        ["performer-oprf"], inputs="encoder", layers=[1], seq_lens=32, rounds=1, isolate="none"
    )
    own = [record for record in results.records if record.case.backend == "performer-oprf"]
    assert len(own) == 3 and {record.calibrated_on for record in own} == {"the inputs measured"}
    assert any("Calibrated on the inputs measured" in note for note in results.tables()[0].notes)


def layered(label, errors, seconds=None):
    """Errors on layers 0, 1 and 5, and one time for all of them."""
    made = []
    for layer, error in zip((0, 1, 5), errors, strict=True):
        made += measured(label, error, inputs=f"encoder(layer={layer})")
    return made + measured(label, None, seconds, inputs="encoder(layers=0,1,5)")


LAYERED = [
    *layered("exact", (3e-7, 4e-7, 2e-7), 0.01),
    *layered("window", (0.05, 0.3, 0.09), 0.004),
    *layered("exact-dense", (2e-7,) * 3, 0.03),
]


def test_near_means_near_on_every_layer():
    told = sentence(LAYERED)
    assert "(encoder, layers 0, 1, 5) nothing is both within 10 % of exact on every layer and faster" in told
    assert "nearest of the faster backends: window (error 0.09 (0.05 to 0.3), 2.50x as fast)" in told
    assert "both within 30 % of exact on every layer and faster: window" in sentence(LAYERED, 0.3)


def test_a_backend_that_fails_on_one_layer_has_no_error_over_all():
    broken = [record for record in LAYERED if record.case.inputs != "encoder(layer=5)"]
    (one,) = comparisons([*broken, *(r for r in LAYERED if r.case.label == "exact")])
    assert {row.label for row in one.contenders if row.error is None} == {"window", "exact-dense"}


def test_runs_on_one_layer_and_on_several_are_told_apart():
    single = [*measured("exact", 4e-7, 0.01), *measured("window", 0.3, 0.004)]
    both = comparisons([*LAYERED, *single])
    assert [one.case.inputs for one in both] == ["encoder(layers=0,1,5)", "encoder(layer=1)"]
    assert [row.layers for one in both for row in one.contenders if row.label == "window"] == [3, 1]


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
    assert "causal) at 24 tokens (causal decoder, layers 18, 19)" in results.sentences()[0]


def test_without_inputs_times_are_of_gaussian_draws_and_errors_of_a_model():
    results = ea.bench(["window"], seq_lens=(16, 24), num_heads=2, head_dim=8, rounds=1, isolate="none")
    kinds = {(record.case.kind, record.case.inputs, record.case.num_heads) for record in results.records}
    layers = {("error", f"encoder(layer={layer})", 12) for layer in (0, 1, 5)}
    assert kinds == {("time", "gaussian", 2), ("memory", "gaussian", 2), *layers}
    shown = [table.title.partition(":")[0] for table in results.tables()]
    assert shown[-3:] == [
        "Relative error of the output",
        "Mean squared error (MSE) of the output",
        "Error, time and memory",
    ]
    assert "at 24 tokens (errors on encoder, layers 0, 1, 5, 12 heads of 32)" in results.sentences()[0]
    assert {"time", "memory", "error", "comparison"} == {*results.plots()}


def test_lengths_beyond_the_inputs_have_no_error_and_that_is_said():
    plan = find("bench").plan(["window"], seq_lens=(512, 513), isolate="none")
    errors = {point.case.tokens for point in points_of(plan) if point.case.kind == "error"}
    assert errors == {512}
    drawn = PLACE | {"inputs": "gaussian"}
    records = [
        *measured("exact", 3e-7),
        Record(case=case("error", "exact", 256, of="output", **PLACE), output_relative_error=3e-7),
        *(Record(case=case("time", "exact", n, **drawn), times_s=(0.1,)) for n in (256, 512, 1024)),
    ]
    notes = [note for table in tables(records, {}) for note in table.notes]
    assert "No error beyond 512 tokens, all of encoder; --inputs FILE takes longer q, k, v." in notes


def test_errors_can_be_left_out():
    plan = find("bench").plan(["window"], seq_lens=64, error=False)
    assert {point.case.kind for point in points_of(plan)} == {"time", "memory"}


@pytest.mark.parametrize(("lengths", "layers"), [((256, 2048), {18, 19}), ((2048, 4096), {19})])
def test_all_lengths_of_one_input_have_the_same_layers(lengths, layers):
    plan = find("bench").plan(["window"], inputs="decoder", seq_lens=lengths)
    errors = {point.case.inputs for point in points_of(plan) if point.case.kind == "error"}
    assert errors == {f"decoder(layer={layer})" for layer in layers}


def test_default_lengths_beyond_the_inputs_are_left_out():
    plan = find("bench").plan(["window"], inputs="encoder")
    assert {point.case.tokens for point in points_of(plan)} == {256, 512}


@pytest.mark.parametrize("tokens", [40, 1500])
@pytest.mark.parametrize("causal", [False, True])
def test_the_error_is_that_of_the_definition_on_the_compared_queries(tmp_path, tokens, causal):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, tokens, 8), *torch.randn(2, 1, 2, tokens, 8)
    write_given(tmp_path / "qkv.safetensors", Subject("x", Activations(3 * q, k, v), 0.5))
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "inputs": "x", "causal": causal}
    record = error_of_case(
        case("error", "uniform attention", tokens, of="output", **shape),
        None,
        str(tmp_path / "qkv.safetensors"),
    )
    keys, values = (x.double().repeat_interleave(2, dim=1) for x in (k, v))
    visible = torch.ones(tokens, tokens).tril().bool() if causal else torch.ones(tokens, tokens).bool()
    weights = (1.5 * q.double() @ keys.mT).masked_fill(~visible, -torch.inf).softmax(-1)
    mean = visible.double() @ values / visible.sum(-1, keepdim=True)
    squares, norms = (mean - weights @ values).square(), (weights @ values).square()
    rows = sampled_queries(tokens, 0) if tokens > 1024 else torch.arange(tokens)
    assert record.compared_queries == (256 if tokens > 1024 else None)
    squares, norms = squares[:, :, rows], norms[:, :, rows]
    assert record.output_relative_error == pytest.approx(float((squares.sum() / norms.sum()).sqrt()))
    assert record.output_mse == pytest.approx(float(squares.mean()))


def test_the_compared_queries_lie_in_equal_parts_of_the_sequence():
    rows = sampled_queries(4096, 3)
    assert (rows // 16).tolist() == list(range(256)) and not (rows % 16 == 0).all()
    assert (rows != sampled_queries(4096, 4)).any()


def test_records_of_concatenated_documents_are_called_that():
    records = [*measured("exact", 3e-7, 0.01, inputs="stitched(layer=1)")]
    (table,) = tables(records, {})
    assert "concatenated documents, layer 1; 512 tokens" in table.title
    assert any(note.startswith("Concatenated documents: q, k and v of four texts") for note in table.notes)
    assert "(concatenated documents, layer 1)" in sentence(records)


def test_layers_of_unlike_shapes_are_refused_until_one_is_named(tmp_path):
    from safetensors.torch import save_file

    tensors = {f"layer.{n}.{x}": torch.randn(n + 1, 8, 4) for n in (0, 1) for x in "qkv"}
    save_file(tensors, tmp_path / "unlike.safetensors")
    named = {"inputs": tmp_path / "unlike.safetensors", "seq_lens": 8}
    with pytest.raises(
        OptionError,
        match="differ in shape or causality; save one alone",
    ):
        ea.bench(["exact"], **named)
    results = ea.bench(["exact"], layers=[1], rounds=1, isolate="none", **named)
    assert {record.case.num_heads for record in results.records} == {2}


@pytest.mark.parametrize(
    ("names", "joint"),
    [
        (["encoder(layer=0)"], "encoder(layer=0)"),
        (["a(layer=1).st(layer=0)", "a(layer=1).st(layer=7)"], "a(layer=1).st(layers=0,7)"),
        (["gaussian(norm=1)"], "gaussian(norm=1)"),
    ],
)
def test_a_joint_name_stands_for_its_layers(names, joint):
    assert joint_name(names) == joint and list(single_names(joint)) == names


def test_by_default_exact_and_what_approximates_softmax_is_compared():
    plan = find("bench").plan(seq_lens=16)
    names = list(dict.fromkeys(point.case.backend for point in points_of(plan)))
    assert {"exact-dense", "window", "performer-positive"} <= {*names} and names[0] == "exact"
    assert not {
        name
        for name in {*names} & {*ea.list_backends()}
        if not ea.spec(name).capabilities.approximates_softmax
    }
    assert plan.about["candidates"][:2] == ["exact", "exact-dense"]


def test_a_backend_that_fails_on_the_first_layer_is_measured_on_no_other():
    def unsteady(q, k, v):
        if q.shape[1] == 12:
            raise RuntimeError("it broke here")
        return v.clone()

    results = ea.bench([unsteady], seq_lens=16, num_heads=2, head_dim=8, rounds=1)
    errors = [r for r in results.records if r.case.label == "unsteady" and r.case.kind == "error"]
    assert [record.status for record in errors] == ["error"]
    assert any("unsteady: error: RuntimeError: it broke here" in note for note in results.tables()[0].notes)


SMALL = {"inputs": "encoder", "layers": [1], "seq_lens": 24, "rounds": 4}


@pytest.mark.parametrize(
    "name", ["exact", "exact-dense", "window", "performer-positive", "uniform attention"]
)
def test_causal_errors_are_those_against_causal_attention(name):
    results = ea.bench(["window", "exact-dense", "performer-positive"], causal=True, isolate="none",
                         options={"window": {"window": [24]}}, **SMALL)  # fmt: skip
    own = [record for record in results.records if record.case.backend == name]
    assert {record.case.causal for record in results.records} == {True}
    assert {record.status for record in own} == {"ok"}
    (error,) = (record.output_relative_error for record in own if record.case.kind == "error")
    # A window as long as the sequence is exact; uniform attention is not.
    assert (error < 1e-4) == (name in ("exact", "exact-dense", "window"))
    (one,) = comparisons(results.records)
    assert name in {row.backend for row in one.contenders} and "causal" in results.sentences()[0]


def test_a_backend_that_cannot_be_causal_is_refused_in_a_record():
    results = ea.bench(["linformer"], causal=True, isolate="none", **SMALL)
    assert {r.status for r in results.records if r.case.backend == "linformer"} == {"unsupported"}


def test_backward_and_batch_are_those_of_times_and_memory_and_are_named():
    results = ea.bench(["window"], backward=True, batch=2, isolate="none", **SMALL)
    assert {record.status for record in results.records} == {"ok"}
    assert {(r.case.kind, r.case.backward, r.case.batch) for r in results.records} == {
        ("error", False, 1),
        ("time", True, 2),
        ("memory", True, 2),
    }
    (one,) = comparisons(results.records)
    assert all(row.error and row.time_s for row in one.contenders if row.backend != "uniform attention")
    assert "batch 2, forward and backward" in results.tables()[0].title
    both = ea.bench(["window"], batch=2, isolate="none", **SMALL)
    assert len(comparisons([*results.records, *both.records])) == 2


def test_queries_and_keys_of_unlike_number_are_refused(tmp_path):
    from safetensors.torch import save_file

    q, k = torch.randn(2, 5, 4), torch.randn(2, 7, 4)
    save_file({"q": q, "k": k, "v": k.clone()}, tmp_path / "cross.safetensors")
    with pytest.raises(OptionError, match=re.escape("have 5 queries for 7 keys")):
        ea.bench(["exact"], inputs=tmp_path / "cross.safetensors")


# Seconds of one error and of one call, rounded, of 512 tokens with 12 heads of 32: their proportions matter.
ERROR_S = {
    "exact": 0.3,
    "uniform attention": 0.001,
    "window-clusters": 0.12,
    "window-clusters(probes=8)": 0.2,
    "window": 0.06,
    "window(global_tokens=4)": 0.06,
    "performer-hyperbolic": 0.9,
    "performer-trig": 1.3,
    "exact-dense": 0.06,
    "linformer": 0.3,
    "performer-oprf": 0.7,
    "performer-positive": 0.6,
    "performer-full": 1.4,
}
CALL_S = {"uniform attention": 1e-4, "exact-dense": 0.03, "performer-full": 0.04}


class Clock:
    """A clock that only measurements advance."""

    def __init__(self):
        self.now_s = 0.0

    def monotonic(self):
        return self.now_s

    def measure(self, point, seconds=0.0):
        """A record of the point, as long after its begin as such a point takes."""
        if point.case.kind == "error":
            self.now_s += ERROR_S[point.case.label]
            return Record(case=point.case)
        call_s = CALL_S.get(point.case.label, 0.015)
        self.now_s += 0.02 + 2 * call_s + max(seconds, call_s)
        timed = {"times_s": (call_s,), "round_sizes": (1,)}
        return Record(case=point.case, **(timed if point.rounds else {}))


def test_the_predicted_duration_is_right_within_a_factor_of_two_from_the_second_backend_on(monkeypatch):
    """Half of a comparison is spent on two points of a hundred; points of equal weight mislead by 8 times."""
    clock, shown = Clock(), []
    monkeypatch.setattr("efficient_attn.studies.engine.time", clock)
    monkeypatch.setattr("efficient_attn.studies.engine._ROUND_S", 0.1)
    plan = find("bench").plan(inputs="encoder", seq_lens=512, rounds=8, isolate="none")
    engine = Engine(
        answered_by(plan, clock.measure), Store(), report=lambda step: shown.append((clock.now_s, step))
    )
    assert engine.run()
    known = [(step.remaining_s, clock.now_s - now_s) for now_s, step in shown if step.done >= 9]
    wrong = [(told, left) for told, left in known if left > 2 and not left / 2 < told < 2 * left]
    assert len(known) > 40 and wrong == []
