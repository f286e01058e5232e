"""Lengths of a model that makes its own inputs, and held-out inputs on which its plan is verified."""

from collections.abc import Sequence

import torch

from efficient_attn.contained import running
from efficient_attn.errors import DataError, UnsupportedError
from efficient_attn.integrations.called import CalledModel, Maker, output_vector
from efficient_attn.integrations.intercept.calls import Site
from efficient_attn.integrations.intercept.replaced import OUTSIDE
from efficient_attn.measure.record import replace
from efficient_attn.studies.advise.shapes import HELD_OUT, SAME_AGAIN
from efficient_attn.studies.swap.called import CallSubject
from efficient_attn.studies.workload import Workload


def inputs_of_lengths(
    maker: Maker, workload: Workload, lengths: Sequence[int | None]
) -> tuple[list[tuple[CallSubject, CallSubject]], list[str]]:
    """Inputs that choose and inputs that verify, for each length; and notes on the others.

    Held-out inputs come from another seed of random numbers. All lengths share the parameters of the first.

    Args:
        lengths: Lengths of inputs; None: the length that the function makes.

    Raises:
        DataError: If the parameters differ from length to length, or outputs cannot be compared.
        UnsupportedError: If no module calls attention that a backend can serve.
    """
    found: list[tuple[CallSubject, CallSubject]] = []
    notes: list[str] = []
    for seq_len in lengths:
        model = maker.model(seq_len=seq_len)
        choosing = CallSubject.of(model, workload)
        if model.is_call and str(Site("", 0)) in choosing.sites.values():
            raise UnsupportedError(f"No plan reaches the attention of {maker.label}: {OUTSIDE}.")
        tokens = choosing.shared["tokens"]
        if any(tokens == one.shared["tokens"] for one, _ in found):
            notes.append(f"Not measured at {seq_len} tokens: the first attention has {tokens}, as before.")
            continue
        with running(maker.label):
            _share(found[0][0].called if found else model, model)
            again = maker.again(model, seq_len=seq_len)
            same = torch.equal(output_vector(model.seeded()), output_vector(again.seeded()))
        inputs = f"{choosing.shared['inputs']}{SAME_AGAIN if same else HELD_OUT}"
        shared = {**choosing.shared, "inputs": inputs}
        found.append((choosing, replace(choosing, called=again, shared=shared, example=model)))
        if same:
            notes.append(
                f"{maker.label} has the same output at {tokens} tokens whatever the random numbers are: its "
                "plan is verified on the inputs that choose it."
            )
    return found, notes


def _share(first: CalledModel, other: CalledModel) -> None:
    """Give a model the parameters of the first."""
    known, own = (dict(one.module.named_parameters()) for one in (first, other))
    if [(name, one.shape) for name, one in known.items()] != [(name, one.shape) for name, one in own.items()]:
        raise DataError(
            f"{other.name} makes models whose parameters differ from length to length: make the model for "
            "the longest length, and only the inputs by seq_len."
        )
    for name, parameter in own.items():
        parameter.data = known[name].data
