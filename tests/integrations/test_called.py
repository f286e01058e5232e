"""Models of the user's own, which a function in a file makes: their making, their refusal, their output."""

import pytest
import torch

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from integrations.called import command

from efficient_attn.integrations.called import called_model, output_vector

pytestmark = pytest.mark.usefixtures("called_models", "undrawn", "hasty")


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
        ("models.py:without", "code with its own softmax must call F.scaled_dot_product_attention"),
    ],
)
@pytest.mark.parametrize("study", ["capture", "swap"])
def test_a_file_that_makes_no_model_is_refused_in_one_line(study, address, message, capsys):
    assert command(study, address, "--out", "new.safetensors" if study == "capture" else "run") == 2
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


def test_a_made_model_is_in_evaluation_mode_and_the_same_every_time():
    one, other = (called_model("models.py:make_pair") for _ in range(2))
    assert not one.module.training and torch.equal(one.run(), other.run())
    parts = list(called_model("models.py:make_call").module.children())
    assert parts and not any(part.training for part in parts)
    assert one.run().grad_fn is None
