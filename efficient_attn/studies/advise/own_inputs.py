"""Lengths of a model that makes its own inputs, and held-out inputs on which its plan is verified."""

from collections.abc import Sequence

import torch
from torch import nn

from efficient_attn.contained import running
from efficient_attn.errors import DataError
from efficient_attn.integrations.called import CalledModel, Maker, output_vector
from efficient_attn.runner.record import replace
from efficient_attn.studies.advise.findings import HELD_OUT, SAME_AGAIN
from efficient_attn.studies.swap.called import CallSubject
from efficient_attn.studies.workload import Workload

_CHOOSING, _HELD_OUT = 0, 1


def inputs_of_lengths(
    maker: Maker, workload: Workload, lengths: Sequence[int | None]
) -> tuple[list[tuple[CallSubject, CallSubject]], list[str]]:
    """Inputs that choose and inputs that verify, for each length; and a note where they are the same.

    Held-out inputs come from another seed of torch's random numbers, with the parameters of the first.

    Args:
        lengths: Lengths of inputs; None: the length that the function makes.

    Raises:
        DataError: If the parameters differ in shape from length to length.
    """
    found, notes, first = [], [], None
    for seq_len in lengths:
        models = [maker.model(seq_len=seq_len, seed=seed) for seed in (_CHOOSING, _HELD_OUT)]
        first = first or models[0]
        for one in models:
            _share(first, one)
        choosing, held_out = (CallSubject.of(one, workload) for one in models)
        with running(maker.label):
            same = torch.equal(output_vector(models[0].seeded()), output_vector(models[1].seeded()))
        inputs = f"{held_out.shared['inputs']}{SAME_AGAIN if same else HELD_OUT}"
        found.append((choosing, replace(held_out, shared={**held_out.shared, "inputs": inputs})))
        if same:
            notes.append(
                f"{maker.label} makes the same inputs of {choosing.shared['tokens']} tokens again, whatever "
                "torch's random numbers are: its plan is verified on the inputs that choose it."
            )
    return found, notes


def _share(first: CalledModel, other: CalledModel) -> None:
    """Give a model the parameters of the first, and its buffers of the same shape."""
    known, own = _tensors(first.module), _tensors(other.module)
    parameters = [name for name, _ in other.module.named_parameters()]
    if known.keys() != own.keys() or any(known[name].shape != own[name].shape for name in parameters):
        raise DataError(
            f"{other.name} makes models whose parameters differ from length to length or from call to call: "
            "make the model for the longest length, and only the inputs by seq_len."
        )
    for name, tensor in own.items():
        if tensor.shape == known[name].shape:
            tensor.data = known[name].data


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])
