"""Swaps of the attention of models of the user's own, which a function in a file makes."""

import json

import pytest
import torch
from reference import reference_attention

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from integrations.called import BACKENDS, OPTIONS, command, projected, the_pair
from integrations.swapped_models import quality

import efficient_attn as ea
from efficient_attn.errors import DataError, UnsupportedError
from efficient_attn.integrations.capture import captured_model
from efficient_attn.integrations.intercept.installed import SiteBackends
from efficient_attn.measure.variants import OWN, UNIFORM_ATTENTION
from efficient_attn.studies import find

pytestmark = pytest.mark.usefixtures("called_models", "undrawn", "hasty")


@torch.no_grad()
def reference(first=None, second=None, *, uniform=False):
    """Output of make_pair's model in float64; `first` and `second` say which keys j a query i may read."""
    model, x, real = the_pair()
    for layer, visible in ((model.masked, first), (model.causal, second)):
        q, k, v = projected(layer, x)
        mask = {"causal": True} if layer.causal else {"key_mask": real}
        y = reference_attention(0 * q if uniform else q, k, v, scale=8**-0.5, visible=visible, **mask)
        x = x.double() + y.transpose(1, 2).flatten(2)
    return x


def test_a_swapped_model_is_as_far_from_itself_as_the_definition():
    results = ea.swap("models.py:make_pair", BACKENDS, options=OPTIONS, by_layer=True, rounds=1)
    found, exact = quality(results), reference()
    label = "window(window=5)"

    def near(i, j):
        return abs(i - j) <= 2

    def recent(i, j):
        return i - j < 5

    expected = {
        (label, None): reference(near, recent),
        (label, 0): reference(first=near),
        (label, 1): reference(second=recent),
        (UNIFORM_ATTENTION, None): reference(uniform=True),
    }
    for key, output in expected.items():
        error = float((output - exact).norm() / exact.norm())
        cosine = float(torch.cosine_similarity(output.flatten(), exact.flatten(), dim=0))
        # Sums of a few dozen float32 terms, through two layers, in errors of some percent.
        assert found[key].output_relative_error == pytest.approx(error, rel=1e-4) and error > 0.01
        assert found[key].output_distance == pytest.approx(1 - cosine, rel=1e-3)
    assert found["exact", None].output_relative_error < 1e-6
    assert found[OWN, None].output_relative_error == 0.0
    record = found[label, None]
    assert record.case.inputs == "models.py:make_pair" and record.texts is None
    kinds = {(one.case.kind, one.case.label) for one in results.records if one.status == "ok"}
    assert {("time", OWN), ("time", label), ("memory", label)} <= kinds


def test_every_call_of_a_pipeline_gets_the_same_noise_and_other_masks_stay_exact():
    results = ea.swap("models.py:make_call", BACKENDS, options=OPTIONS, rounds=1)
    found = quality(results)
    assert found[OWN, None].output_relative_error == 0.0
    assert found["exact", None].output_relative_error < 1e-6 < found["window(window=5)", None].output_distance
    plan = find("swap").plan("models.py:make_call", BACKENDS)
    assert plan.notes == [
        "Layers are call sites: 0 is Model.masked, 1 is Model.causal.",
        "Left out: model: its mask is no key mask and not causal.",
    ]
    assert plan.about["model"] == json.loads(json.dumps(plan.about["model"]))


def test_the_model_keeps_its_own_attention_afterwards_and_a_pair_of_objects_is_taken_too():
    model, x, real = the_pair()
    before = model.eval()(x, real)
    results = ea.swap((model, (x, real)), BACKENDS, options=OPTIONS, rounds=1, name="mine")
    assert torch.equal(model(x, real), before)
    assert not any(isinstance(part, SiteBackends) for part in model.modules())
    assert {record.case.inputs for record in results.records} == {"mine"}


def test_a_backend_that_cannot_serve_a_site_is_recorded_with_the_reason(capsys):
    asked = ["--backend", "linformer", "--set", "linformer.rank=4", "--rounds", "1"]
    assert command("swap", "models.py:make_pair", *asked) == 4
    out = capsys.readouterr().out
    assert "linformer(rank=4): unsupported: causal cannot be served: Backend 'linformer' cannot" in out
    assert "cosine of the output" in out
    assert "Means over draws" in out


@pytest.mark.parametrize(
    "words", [("--text", "models.py"), ("--seq-len", "8"), ("--dtype", "float32"), ("--device", "cpu")]
)
def test_options_of_a_folder_are_refused(words, capsys):
    assert command("swap", "models.py:make_pair", *words) == 2
    name = {"--seq-len": "seq_lens"}.get(words[0], words[0].removeprefix("--"))
    assert f"error: {name} belongs to a Hugging Face folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("make_number", "models.py:make_number returns a single number, which has no cosine"),
        ("make_nan", "models.py:make_nan returns numbers that are not finite; return real rows alone"),
        ("make_other", "models.py:make_other returns another output in its next run"),
    ],
)
def test_outputs_that_cannot_be_compared_are_refused(name, message):
    with pytest.raises(DataError, match=message):
        ea.swap(f"models.py:{name}", ["window"])


def test_random_numbers_of_numpy_and_python_are_the_same_in_every_run():
    results = ea.swap("models.py:make_numpy", ["exact"], rounds=1)
    assert quality(results)["exact", None].output_relative_error < 1e-6


def test_a_resumed_swap_of_another_model_is_refused(tmp_path):
    given = {"backends": ["exact"], "rounds": 1, "out": tmp_path / "run"}
    ea.swap("models.py:make_pair", **given)
    assert ea.swap("models.py:make_pair", **given, resume=True).records
    models = tmp_path / "models.py"
    models.write_text(models.read_text().replace("2 * torch.randn(1, 12, 16), ", "torch.randn(1, 12, 16), "))
    with pytest.raises(DataError, match=r"another model or other inputs \(digest\)"):
        ea.swap("models.py:make_pair", **given, resume=True)


def test_cross_attention_uneven_runs_and_outputs_without_numbers_are_refused():
    with pytest.raises(UnsupportedError, match=r"model: its queries and keys differ in number"):
        ea.swap("models.py:make_cross", ["window"])
    with pytest.raises(UnsupportedError, match="Repeated: the runs of its module differ in their number"):
        ea.swap("models.py:make_uneven", ["window"])
    with pytest.raises(DataError, match="The model returns str without a floating-point tensor"):
        ea.swap("models.py:wordless", ["window"])
    assert len(captured_model("models.py:wordless").layers) == 1
