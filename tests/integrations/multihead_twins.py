"""torch's multi-head layer beside ours: the same weights, the same call."""

from typing import Any

import torch
from torch import Tensor, nn

import efficient_attn as ea

DIM, HEADS, BATCH, TOKENS, KEYS = 12, 3, 2, 5, 7
LATER = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)


def twins(**arguments: Any) -> tuple[nn.MultiheadAttention, ea.MultiheadAttention]:
    """torch's layer and ours with the same weights, none of them zero, in float64."""
    backend = {name: arguments.pop(name) for name in ("backend", "causal") if name in arguments}
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(DIM, HEADS, dtype=torch.float64, **arguments)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    ours = ea.MultiheadAttention(DIM, HEADS, dtype=torch.float64, **arguments, **backend)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_same_call(theirs: nn.Module, ours: nn.Module, inputs: list[Tensor], **call: Any) -> None:
    """Outputs, weights, and the gradients of inputs and parameters agree to 1e-12."""
    answers = []
    for layer in (theirs, ours):
        # What was one tensor stays one: torch goes another way then, and so do we.
        leaves = {id(x): x.clone().requires_grad_() for x in inputs}
        out, weights = layer(*(leaves[id(x)] for x in inputs), **call)
        loss = out.square().sum() + (0.0 if weights is None else weights.square().sum())
        leaves_and_parameters = [*leaves.values(), *layer.parameters()]
        answers.append((out, weights, torch.autograd.grad(loss, leaves_and_parameters)))
    (out, weights, gradients), (our_out, our_weights, our_gradients) = answers
    torch.testing.assert_close(our_out, out, rtol=0, atol=1e-12)
    assert (weights is None) == (our_weights is None)
    if weights is not None:
        torch.testing.assert_close(our_weights, weights, rtol=0, atol=1e-12)
    for ours_, theirs_ in zip(our_gradients, gradients, strict=True):
        torch.testing.assert_close(ours_, theirs_, rtol=1e-12, atol=1e-12)


def as_numbers(mask: Tensor) -> Tensor:
    """What is added to scores: −inf where True hides a key, 0 elsewhere."""
    return torch.where(mask, -torch.inf, 0.0).double()


def masks(keys: int, kind: str) -> dict[str, Tensor]:
    """Padding and patterns that leave every query some key, as True for hidden or as numbers."""
    padding = torch.zeros(BATCH, keys, dtype=torch.bool)
    padding[0, -2:] = True
    pattern = draw(TOKENS, keys, seed=2) > 0.5
    pattern[:, 1] = False
    numbers = draw(BATCH * HEADS, TOKENS, keys, seed=3)
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "pattern": {"attn_mask": pattern},
        "both": {"key_padding_mask": padding, "attn_mask": pattern},
        "pattern of each head": {"attn_mask": numbers > 1},
        "numbers": {"attn_mask": numbers},
        "both in numbers": {
            "key_padding_mask": as_numbers(padding),
            "attn_mask": numbers,
        },
        "numbers on keys": {"key_padding_mask": draw(BATCH, keys, seed=4)},
    }[kind]
