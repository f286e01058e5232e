"""The advice for models of the user's own, which a function in a file makes; their times are given."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

import efficient_attn as ea
from efficient_attn.errors import DataError, OptionError, UnsupportedError
from efficient_attn.external import object_at
from efficient_attn.integrations.called import maker_of
from efficient_attn.integrations.intercept.replaced import OUTSIDE
from efficient_attn.measure.error import cosine_distance
from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import OWN, UNIFORM_ATTENTION
from efficient_attn.studies.swap import measure
from efficient_attn.studies.swap.called import inputs_of_lengths
from efficient_attn.studies.workload import Workload, settle

TIMES_S = {
    OWN: 1.0,
    "exact": 1.0,
    UNIFORM_ATTENTION: 0.25,
    "window": 0.4,
    "performer-positive": 0.4,
    "performer-full": 0.4,
    "plan": 0.5,
}
PLAN = "layers.json"
MODELS = Path(__file__).with_name("called_models.py")
WORKLOAD = settle(Workload(threads=1))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, undrawn):
    """A folder with a file of models; times are those of TIMES_S on an idle machine, nothing is predicted."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(MODELS.read_text())

    def timed(case, variant, subject, *, seconds):
        with subject.replaced(variant):
            subject.forward()
        return Record(case=case, times_s=(TIMES_S[case.backend],), round_sizes=(1,))

    monkeypatch.setattr(measure, "cost", timed)
    monkeypatch.setattr("efficient_attn.studies.advise.model.PROBE", ())
    monkeypatch.setattr("efficient_attn.studies.run.between", lambda *moments, **named: {})
    return tmp_path


def advise(name, **changes):
    given = {"backends": ["window"], "options": {"window": {"window": [7]}}, "min_cosine": 0.9, **changes}
    return ea.advise(f"models.py:{name}", **given)


def made(name, seed, **arguments):
    """What a function makes after torch.manual_seed(seed)."""
    _, make = object_at(f"models.py:{name}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make(**arguments)


@torch.no_grad()
def test_the_plan_of_every_length_is_verified_on_other_inputs_and_reproduced_by_replace(folder):
    results = advise("make_lengths", seq_lens=(12, 20), min_cosine=0.5)
    verified = {
        one.case.tokens: one for one in results.records if (one.case.kind, one.case.label) == ("swap", "plan")
    }
    assert list(verified) == [12, 20]
    assert {one.case.inputs for one in verified.values()} == {"models.py:make_lengths, held out"}
    sentence, code = results.sentences()
    assert sentence.startswith(
        "Faster from 12 tokens (cosine of the output 0.5000). At 12 tokens 2.00x as fast"
    )
    assert "window(window=7) in layers 0–1" in sentence
    assert f'efficient_attn.intercept.replace(model, "{PLAN}", example=' in code
    (folder / PLAN).write_text(results.files()[PLAN])
    (model, _), (_, inputs) = made("make_lengths", 0), made("make_lengths", 1, seq_len=20)
    exact = model(*inputs)
    replaced = ea.intercept.replace(model, PLAN, example=lambda: model(*inputs), strict=True)
    assert replaced.served == {"0": "window", "1": "window"}
    distance = cosine_distance(model(*inputs).flatten(), exact.flatten())
    assert verified[20].output_distance == pytest.approx(distance, abs=1e-6) and distance > 1e-4


@torch.no_grad()
def test_random_features_of_a_plan_are_those_of_its_verification(folder):
    settings = {"performer-positive": {"num_features": [16], "seed": [5]}}
    results = advise(
        "make_drawn", backends=["performer-positive"], options=settings, min_cosine=0.0, seq_lens=(12,)
    )
    (plan,) = (one for one in results.records if (one.case.kind, one.case.label) == ("swap", "plan"))
    (folder / PLAN).write_text(results.files()[PLAN])
    layers = json.loads(results.files()[PLAN])["layers"].values()
    assert len({one["options"]["seed"] for one in layers}) == 2
    alone = {one.case.layer for one in results.records if one.case.layer is not None}
    assert alone == {0, 1}
    # The parameters are those of the first seed, the inputs of the run those of the second.
    call = made("make_drawn", 0)
    model = call.__closure__[0].cell_contents
    x = 2 * torch.randn(1, 12, 16, generator=torch.Generator().manual_seed(1))
    exact = model(x)
    assert "torch.nn.ModuleDict({'Sequential': …})" in results.sentences()[1]
    parts = torch.nn.ModuleDict({"Sequential": model})
    with ea.intercept.replace(parts, PLAN, example=lambda: model(x)) as replaced:
        assert len(replaced.served) == 2
        distance = cosine_distance(model(x).flatten(), exact.flatten())
    assert plan.output_distance == pytest.approx(distance, abs=1e-6) and distance > 1e-4


def test_a_model_without_lengths_is_verified_on_the_inputs_that_choose_and_says_so(folder):
    plan = ea.studies.find("advise").plan("models.py:make_same", ["window"])
    assert any(
        "has the same output at 10 tokens whatever the random numbers are" in note for note in plan.notes
    )
    results = advise("make_same")
    assert "10 tokens" in results.sentences()[0]
    assert {one.case.inputs for one in results.records if one.case.label == "plan"} == {
        "models.py:make_same, again"
    }


def test_parameters_that_depend_on_the_length_are_refused():
    with pytest.raises(DataError, match="make the model for the longest length, and only the inputs by seq_"):
        advise("make_sized", seq_lens=(12, 16))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"backend": "windoww", "options": {}}, "names the backend 'windoww', which is not registered"),
        ({"backend": "window", "options": {"head_dim": 8}}, "layers.json, 0: .*head_dim"),
        ({"backend": "window-clusters", "options": {"steps": 10**9}}, "is above 65536"),
        (
            {"backend": "by-head", "options": {"heads": {"0": "evil.py:f"}}},
            "'evil.py:f', which is not registered",
        ),
        (
            {"backend": "by-head", "options": {"heads": {"0": ("linformer", {"rank": 10**9})}}},
            "is above 65536",
        ),
        ({"backend": "by-head", "options": {"heads": 3}}, "the options of 'by-head' are none: heads maps"),
        ({"backend": "by-head", "options": {"head": {}}}, "the options of 'by-head' are none: .*'head'"),
    ],
)
def test_a_foreign_plan_is_refused_in_one_line(layer, message, folder):
    (model, inputs) = made("make_lengths", 0)
    text = json.dumps({"format": 1, "layers": {"0": {"max_tokens": None, **layer}}})
    (folder / PLAN).write_text(text)
    with pytest.raises(ea.errors.AttentionError, match=message) as raised:
        ea.intercept.replace(model, PLAN, example=lambda: model(*inputs))
    assert "\n" not in str(raised.value)
    assert not any("efficient_attn" in name for name, _ in model.named_modules())


def test_a_plan_sets_the_options_itself(folder):
    (model, inputs) = made("make_lengths", 0)
    with pytest.raises(OptionError, match="With the file of a plan, options and patterns belong into it"):
        ea.intercept.replace(model, PLAN, example=lambda: model(*inputs), window=3)


@torch.no_grad()
def test_a_calibrated_backend_is_verified_with_the_calibration_of_the_choosing_inputs(folder):
    settings = {"performer-full": {"num_features": [16]}}
    results = advise(
        "make_lengths", backends=["performer-full"], options=settings, min_cosine=0.0, seq_lens=(12,)
    )
    (plan,) = (one for one in results.records if (one.case.kind, one.case.label) == ("swap", "plan"))
    (folder / PLAN).write_text(results.files()[PLAN])
    (model, choosing), (_, held_out) = made("make_lengths", 0), made("make_lengths", 1)
    exact, distances = model(*held_out), []
    for inputs in (choosing, held_out):
        with ea.intercept.replace(model, PLAN, example=lambda inputs=inputs: model(*inputs)):
            distances.append(cosine_distance(model(*held_out).flatten(), exact.flatten()))
    assert plan.output_distance == pytest.approx(distances[0], abs=1e-6)
    assert abs(distances[1] - distances[0]) > 1e-4


def test_buffers_of_a_length_are_its_own_and_parameters_are_the_first_ones(monkeypatch):
    pairs, _ = inputs_of_lengths(maker_of("models.py:make_scaled"), WORKLOAD, (12, 16))
    modules = [choosing.model for choosing, _ in pairs]
    assert [float(module.scale) for module in modules] == [12.0, 16.0]
    assert torch.equal(modules[0].projection.weight, modules[1].projection.weight)
    assert all(held_out.model is choosing.model for choosing, held_out in pairs)


def test_attention_outside_of_modules_stays_exact_and_parameters_of_a_call_are_the_same(folder):
    ((choosing, held_out),), _ = inputs_of_lengths(maker_of("models.py:make_method"), WORKLOAD, (None,))
    assert {*choosing.left} == {"model", "model#1"} and [*choosing.sites.values()] == ["Attention"]
    with pytest.raises(
        UnsupportedError, match=f"No plan reaches the attention of models.py:make_plain: {OUTSIDE}"
    ):
        advise("make_plain")
    assert not torch.equal(choosing.exact[0], held_out.exact[0])
    inner = choosing.called.call._call.__closure__
    assert held_out.called.call._call.__closure__ is inner
    call = made("make_method", 0)
    (method,) = (cell.cell_contents for cell in call.__closure__ if hasattr(cell.cell_contents, "encode"))
    x = torch.randn(1, 12, 16)
    with pytest.raises(UnsupportedError, match="outside the forward of a module of the model"):
        ea.intercept.replace(method, "window", window=3, example=lambda: method.encode(x), strict=True)


def test_lengths_that_the_attention_does_not_have_are_noted():
    _, notes = inputs_of_lengths(maker_of("models.py:make_clipped"), WORKLOAD, (12, 16, 24))
    assert notes == ["Not measured at 24 tokens: the first attention has 16, as before."]


def test_a_function_with_lengths_is_taken_in_python_too():
    _, make = object_at("models.py:make_lengths")
    results = ea.advise(make, ["window"], seq_lens=(12, 16), min_cosine=0.5, name="mine")
    assert {one.case.tokens for one in results.records} == {12, 16}


def test_a_resumed_advice_has_the_same_model(folder):
    given = {"seq_lens": (12,), "out": folder / "run"}
    first = advise("make_lengths", **given)
    assert advise("make_lengths", **given, resume=True).sentences() == first.sentences()
    models = folder / "models.py"
    models.write_text(models.read_text().replace("2 * torch.randn", "9 * torch.randn"))
    with pytest.raises(DataError, match="another model or other inputs"):
        advise("make_lengths", **given, resume=True)


@pytest.mark.parametrize("mapping", [{}, {"format": 1, "layers": {}}])
def test_nothing_to_replace_is_refused(mapping, folder):
    model, inputs = made("make_lengths", 0)
    (folder / PLAN).write_text(json.dumps(mapping))
    with pytest.raises(ea.errors.AttentionError, match=r"names no site|not a plan|names no layer"):
        ea.intercept.replace(model, PLAN if mapping else {}, example=lambda: model(*inputs))
