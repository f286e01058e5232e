"""Models of the user's own, which a function in a file makes: captured, measured and swapped."""

import json

import pytest
import torch
from reference import reference_attention

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

import efficient_attn as ea
from efficient_attn.errors import DataError, OptionError, UnsupportedError
from efficient_attn.external import object_at
from efficient_attn.integrations.called import called_model
from efficient_attn.integrations.called_capture import captured_model
from efficient_attn.integrations.called_outputs import output_vector
from efficient_attn.integrations.intercept.replaced import SiteBackends
from efficient_attn.measure.inputs import read_activations
from efficient_attn.runner.sizes import MEAN_OF_VALUES, OWN
from efficient_attn.studies import find, loop
from efficient_attn.studies import results as drawn
from efficient_attn_cli.main import main

MODELS = """
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Size:
    dim: int = 16


class Attention(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.causal, self.projection, self.dropout = causal, nn.Linear(Size().dim, 48), nn.Dropout(0.5)

    def forward(self, x, real):
        q, k, v = self.projection(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mask = None if self.causal else real[:, None, None]
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)
        return x + self.dropout(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.masked, self.causal = Attention(False), Attention(True)

    def forward(self, x, real):
        return self.causal(self.masked(x, real), real)


def make_pair():
    print("a model is made")
    real = torch.ones(1, 12, dtype=torch.bool)
    real[0, 9:] = False
    return Model(), {"x": 2 * torch.randn(1, 12, 16), "real": real}


def make_call():
    model, inputs = make_pair()

    def run():
        inner = model(**inputs) + 0.1 * torch.randn(1, 12, 16)
        q = inner[:, None]
        biased = F.scaled_dot_product_attention(q, q, q, torch.rand(12, 12))
        return {"pair": (biased, [model.causal(inner, None)]), "ids": torch.arange(3)}

    return run


def make_plain():
    q, k, v = torch.randn(3, 1, 2, 12, 8)
    return lambda: F.scaled_dot_product_attention(q, k, v)


def make_cross():
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 12, 8)
    return lambda: F.scaled_dot_product_attention(q, k, k)


def make_number():
    q = torch.randn(1, 2, 12, 8)
    return lambda: F.scaled_dot_product_attention(q, q, q).mean()


def make_nan():
    q = torch.randn(1, 2, 12, 8)
    return lambda: F.scaled_dot_product_attention(q, q, q / 0)


def make_other():
    inputs = iter(range(1, 99))

    def run():
        q = torch.randn(1, 2, 12, 8, generator=torch.Generator().manual_seed(next(inputs)))
        return F.scaled_dot_product_attention(q, q, q)

    return run


def make_numpy():
    import random

    import numpy

    def run():
        noise = torch.from_numpy(numpy.random.randn(1, 2, 12, 8)).float() + random.random()
        return F.scaled_dot_product_attention(noise, noise, noise)

    return run


def raising():
    raise ValueError("no weights\\nhere")


def leaving():
    raise SystemExit("bye")


def failing():
    return Model(), ()


def nothing():
    return Model()


def without():
    return nn.Linear(2, 2), (torch.ones(1, 2),)


def wordless():
    q = torch.randn(1, 2, 12, 8)
    return lambda: str(F.scaled_dot_product_attention(q, q, q))


made = 3
"""
BACKENDS, OPTIONS = ["exact", "window"], {"window": {"window": [5]}}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder of the command with a file of models; times and figures are of no interest."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(drawn, "write_all", lambda runs, folder, look: [])
    monkeypatch.setattr(loop, "_ROUND_S", 0.0)
    (tmp_path / "models.py").write_text(MODELS)
    return tmp_path


def command(*words):
    """The exit code of the command."""
    with pytest.raises(SystemExit) as exit_:
        main([str(word) for word in words])
    return exit_.value.code


def the_pair():
    """The model and the inputs of make_pair, made from the same random numbers."""
    _, make = object_at("models.py:make_pair")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, inputs = make()
    return model, inputs["x"], inputs["real"]


def projected(attention, x):
    """q, k and v of a layer in float64, [batch heads tokens head_dim] each."""
    weight, bias = attention.projection.weight.double(), attention.projection.bias.double()
    return (x.double() @ weight.mT + bias).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)


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


def quality(results):
    """{(label, layer): record} of the distances."""
    return {(r.case.label, r.case.layer): r for r in results.records if r.case.kind == "swap"}


@torch.no_grad()
def test_the_activations_of_a_file_are_captured_and_measured(capsys):
    assert command("capture", "models.py:make_pair", "--out", "all.safetensors") == 0
    out, told = capsys.readouterr()
    assert out == "all.safetensors\n" and "a model is made" in told
    assert "Layers are call sites: 0 is masked, 1 is causal." in told and "Layers 0, 1 on 12 tokens" in told
    kept = read_activations("all.safetensors")
    assert kept.about["model"] == "models.py:make_pair"
    assert json.loads(kept.about["sites"]) == ["masked", "causal"]
    assert kept.scale == 8**-0.5 and kept.patterns == {1: "causal over all keys"}
    model, x, _ = the_pair()
    for stored, tensor in zip(kept.layers[0], projected(model.masked, x), strict=True):
        # Three of twelve tokens are padding; float16 keeps eleven bits.
        torch.testing.assert_close(stored.double(), tensor[..., :9, :], rtol=2**-11, atol=1e-6)
    assert command("mse", "--inputs", "all.safetensors", "--backend", "window", "--size", "3", "-q") == 0
    asked = ["compare", "--inputs", "all.safetensors", "--backend", "window", "--set", "window.window=5"]
    quick = ["--draws", "1", "--rounds", "1", "--isolate", "none", "-q"]
    assert command(*asked, "--layer", "1", *quick, "--out", "run") == 0
    assert {record.case.causal for record in ea.read("run").records} == {True}


def test_layers_are_chosen_by_number_and_a_text_is_refused(capsys):
    asked = ["capture", "models.py:make_pair", "--out", "one.safetensors"]
    assert command(*asked, "--layers", "2") == 2
    assert "layers are from 0 to 1 in this model, not 2" in capsys.readouterr().err
    assert command(*asked, "--text", "models.py") == 2
    told = capsys.readouterr().err
    assert "text belongs to a Hugging Face folder; 'models.py:make_pair' decides its own" in told
    assert command("capture", ".", "--out", "one.safetensors") == 2
    assert "text (--text FILE) is needed with the folder '.'" in capsys.readouterr().err
    assert command(*asked, "--layers", "1", "--name", "mine") == 0
    kept = read_activations("one.safetensors")
    assert list(kept.layers) == [1] and kept.about["model"] == "mine"


def test_sites_of_a_call_are_named_by_the_modules_that_it_runs():
    captured = captured_model("models.py:make_call")
    assert json.loads(captured.about["sites"]) == ["Model.masked", "Model.causal"]
    assert json.loads(captured.about["left_out"]) == {"model": "its mask is no key mask and not causal"}
    assert json.loads(captured_model("models.py:make_plain").about["sites"]) == ["model"]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("absent.py:make", "There is no file 'absent.py' to take a model from."),
        ("models.py:make_par", "Did you mean 'make_pair'?"),
        ("models.py", "model 'models.py' names no function: write models.py:make_model."),
        ("models.py:made", "models.py:made is a function that returns a call without arguments, or a pair"),
        ("models.py:raising", "models.py:raising fails: ValueError: no weights here."),
        ("models.py:leaving", "models.py:leaving fails: SystemExit: bye."),
        ("models.py:failing", "models.py:failing fails: TypeError: Model.forward() missing 2 required"),
        (
            "models.py:nothing",
            "models.py:nothing returns a call without arguments, or a pair (module, inputs)",
        ),
        ("models.py:without", "F.scaled_dot_product_attention"),
    ],
)
@pytest.mark.parametrize("study", ["capture", "swap"])
def test_a_file_that_makes_no_model_is_refused_in_one_line(study, address, message, capsys):
    assert command(study, address, "--out", "new.safetensors" if study == "capture" else "run") == 2
    told = capsys.readouterr().err
    assert message in told and told.startswith("error: ") and told.count("\n") == 1


def test_mse_and_compare_capture_a_model_in_memory():
    found = ea.mse(["window"], model="models.py:make_pair", sizes=[3], draws=1)
    assert {record.case.inputs for record in found.records} == {"models.py:make_pair(layer=0)"}
    captured = captured_model("models.py:make_pair").layers[0]
    expected = reference_attention(*captured, scale=8**-0.5)
    window = reference_attention(*captured, scale=8**-0.5, visible=lambda i, j: abs(i - j) <= 1)
    (record,) = (r for r in found.records if r.case.backend == "window")
    relative = float((window - expected).norm() / expected.norm())
    assert record.output_relative_error == pytest.approx(relative, rel=1e-5)
    quick = {"draws": 1, "rounds": 1, "isolate": "none", "options": OPTIONS}
    found = ea.compare(["window"], model="models.py:make_pair", layer=1, **quick)
    assert {record.case.inputs for record in found.records} == {"models.py:make_pair(layer=1)"}
    with pytest.raises(OptionError, match=r"inputs \(decoder\) and model \(models.py:make_pair\) exclude"):
        ea.compare(["window"], model="models.py:make_pair", inputs="decoder")
    with pytest.raises(OptionError, match="text belongs to a model"):
        ea.mse(["window"], text="words")
    with pytest.raises(OptionError, match="text belongs to a Hugging Face folder"):
        ea.mse(["window"], model="models.py:make_pair", text="words")


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
        (MEAN_OF_VALUES, None): reference(uniform=True),
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


@pytest.mark.parametrize("words", [("--text", "models.py"), ("--seq-len", "8"), ("--dtype", "bfloat16")])
def test_options_of_a_folder_are_refused(words, capsys):
    assert command("swap", "models.py:make_pair", *words) == 2
    name = words[0].removeprefix("--").replace("-", "_")
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
    (tmp_path / "models.py").write_text(
        MODELS.replace("2 * torch.randn(1, 12, 16), ", "torch.randn(1, 12, 16), ")
    )
    with pytest.raises(DataError, match=r"another model or other inputs \(digest\)"):
        ea.swap("models.py:make_pair", **given, resume=True)


def test_cross_attention_and_outputs_without_numbers_are_refused():
    with pytest.raises(UnsupportedError, match=r"model: its queries and keys differ in number"):
        ea.swap("models.py:make_cross", ["window"])
    with pytest.raises(DataError, match="The model returns str without a floating-point tensor"):
        ea.swap("models.py:wordless", ["window"])
    assert len(captured_model("models.py:wordless").layers) == 1


def test_all_tensors_of_a_nested_output_are_compared_and_the_first_of_another_object():
    class Output(dict):
        pass

    class Slotted:
        def __init__(self):
            self.loss, self.ids, self.logits = None, torch.arange(2), torch.full((1, 2), 5.0)

    nested = {"a": (torch.ones(2), [torch.zeros(1, dtype=torch.float64)]), "ids": torch.arange(4)}
    assert output_vector(nested).tolist() == [1, 1, 0]
    # A loss comes before the hidden states in outputs of transformers.
    parts = {"ids": torch.arange(2), "loss": torch.ones(()), "x": torch.zeros(3), "y": torch.ones(2)}
    assert output_vector(Output(**parts)).tolist() == [0, 0, 0]
    assert output_vector(Slotted()).tolist() == [5, 5]


def test_a_made_model_is_in_evaluation_mode_and_the_same_every_time():
    one, other = (called_model("models.py:make_pair") for _ in range(2))
    assert not one.module.training and torch.equal(one.run(), other.run())
    parts = list(called_model("models.py:make_call").module.children())
    assert parts and not any(part.training for part in parts)
    assert one.run().grad_fn is None
