"""The model of `make_pair` in called_models.py, its layers by definition, and commands that name it."""

import pytest
import torch

from efficient_attn.external import object_at
from efficient_attn_cli.main import main

BACKENDS, OPTIONS = ["exact", "window"], {"window": {"window": [5]}}


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
