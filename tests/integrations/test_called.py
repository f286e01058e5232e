"""Models that a function in a file makes: their refusal, their output, their captured activations."""

import json

import pytest
import torch

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from integrations.called import command, projected, the_pair

import efficient_attn as ea
from efficient_attn.integrations.called import called_model, output_vector
from efficient_attn.integrations.capture import captured_model
from efficient_attn.measure.inputs import read_activations

pytestmark = pytest.mark.usefixtures("called_models", "undrawn", "hasty")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("absent.py:make", "There is no file 'absent.py' to take a model from."),
        ("models.py:make_par", "Did you mean 'make_pair'?"),
        ("models.py", "model 'models.py' names no function: write models.py:make_model."),
        (
            "models.py:number",
            "models.py:number is a function that returns a call without arguments, or a pair",
        ),
        ("models.py:raising", "models.py:raising fails: ValueError: no weights here."),
        ("models.py:leaving", "models.py:leaving fails: SystemExit: bye."),
        ("models.py:failing", "models.py:failing fails: TypeError: Model.forward() missing 2 required"),
        (
            "models.py:nothing",
            "models.py:nothing returns a call without arguments, or a pair (module, inputs)",
        ),
        ("models.py:without", "code with its own softmax must call F.scaled_dot_product_attention"),
    ],
)
def test_a_file_that_makes_no_model_is_refused_in_one_line(address, message, capsys):
    assert command("swap", address, "--out", "run") == 2
    told = capsys.readouterr().err
    assert message in told and told.startswith("error: ") and told.count("\n") == 1


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


def test_a_model_is_in_evaluation_mode_and_the_same_every_time():
    first, second = (called_model("models.py:make_pair") for _ in range(2))
    assert not first.module.training and torch.equal(first.run(), second.run())
    parts = list(called_model("models.py:make_call").module.children())
    assert parts and not any(part.training for part in parts)
    assert first.run().grad_fn is None


@torch.no_grad()
def test_the_activations_of_a_file_are_captured_and_measured(capsys):
    words = ["swap", "models.py:make_pair", "--save", "all.safetensors", "--backend", "exact"]
    assert command(*words, "--rounds", "1", "--out", "swapped") == 0
    out, told = capsys.readouterr()
    assert "a model is made" in told and "Layers are call sites: 0 is masked, 1 is causal." in out + told
    assert "Saved layers 0, 1 on 12 tokens: all.safetensors." in out + told
    stored = read_activations("all.safetensors")
    assert stored.about["model"] == "models.py:make_pair"
    assert json.loads(stored.about["sites"]) == ["masked", "causal"]
    assert stored.scale == 8**-0.5 and stored.patterns == {1: "causal over all keys"}
    model, x, _ = the_pair()
    for half, tensor in zip(stored.layers[0], projected(model.masked, x), strict=True):
        # Three of twelve tokens are padding; float16 keeps eleven bits.
        torch.testing.assert_close(half.double(), tensor[..., :9, :], rtol=2**-11, atol=1e-6)
    assert command("mse", "--inputs", "all.safetensors", "--backend", "window", "--size", "3", "-q") == 0
    words = ["bench", "--inputs", "all.safetensors", "--backend", "window", "--set", "window.window=5"]
    quick = ["--seq-len", "9", "--rounds", "1", "-q"]
    assert command(*words, *quick, "--out", "run") == 0
    assert {record.case.inputs for record in ea.read("run").records} == {"all.safetensors(layer=0)"}


def test_sites_of_a_call_are_named_by_the_modules_that_it_runs():
    captured = captured_model("models.py:make_call")
    assert json.loads(captured.about["sites"]) == ["Model.masked", "Model.causal"]
    assert json.loads(captured.about["left_out"]) == {"model": "its mask is no key mask and not causal"}
    assert json.loads(captured_model("models.py:make_plain").about["sites"]) == ["model"]
