"""Every registered operator passes all of torch's own checks of a registration."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import efficient_attn as ea
from efficient_attn.ops.linear import causal as linear_causal
from efficient_attn.ops.linear import full as linear_full
from efficient_attn.ops.linear.features import MAPS
from efficient_attn.ops.window import operator as window_operator

UTILITIES = [
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    # Symbolic sizes are no integers to the runtime shape checks, which `-m compile` is without.
    pytest.param("test_aot_dispatch_dynamic", marks=pytest.mark.compile),
]
OPERATORS = {
    "full_linear": linear_full._full,
    "full_linear_backward": linear_full._full_backward,
    "causal_linear": linear_causal._causal,
    "causal_linear_backward": linear_causal._causal_backward,
    "window": window_operator.fused_window,
    "window_backward": window_operator.fused_window_backward,
}


def inputs(tokens: int, dtype: torch.dtype, *, trained: bool, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for heads in (4, 2, 2):
        x = torch.randn(2, heads, tokens, 4, generator=generator, dtype=torch.float64).to(dtype)
        x = x.transpose(1, 2).contiguous().transpose(1, 2) if layout == "strided" else x
        tensors.append(x.requires_grad_(trained))
    return tensors[0], tensors[1], tensors[2]


def arguments(name: str, *, trained: bool, few: bool) -> Iterator[tuple[Any, ...]]:
    """Arguments of the forward operators: kinds of features, dtypes, masks, layouts."""
    mask = torch.arange(9)[None] >= torch.tensor([[0], [4]])
    for dtype in (torch.float64,) if few else (torch.float32, torch.float64, torch.bfloat16):
        for key_mask in (None, mask):
            for layout in ("contiguous",) if few else ("contiguous", "strided"):
                q, k, v = inputs(9, dtype, trained=trained, layout=layout)
                if name == "window":
                    yield q, k, v, key_mask, 2, 1, 0.5
                    continue
                for kind in ("positive", "trigonometric", "elu"):
                    directions = torch.ones(3, 4) if MAPS[kind].per_direction else None
                    weights = torch.zeros(2, 1, 3) if kind == "positive" else None
                    yield q, k, v, key_mask, directions, weights, kind, -0.5


def backward_arguments(name: str, *, few: bool) -> Iterator[tuple[Any, ...]]:
    for args in arguments(name, trained=False, few=few):
        outputs = OPERATORS[name](*args)
        yield torch.ones_like(outputs[0]), *outputs, *args


def test_every_registered_operator_is_checked():
    # Derivatives are registered where backends are defined.
    assert ea.list_backends()
    names = (name.split("::") for name in torch._C._dispatch_get_all_op_names())
    assert {name for namespace, name in names if namespace == "efficient_attn"} == set(OPERATORS)


@pytest.mark.parametrize("utility", UTILITIES)
@pytest.mark.parametrize("name", OPERATORS)
def test_torch_finds_nothing_wrong_with_a_registration(name, utility):
    assert ea.list_backends()
    forward = name.removesuffix("_backward")
    # A compilation takes a second.
    few = utility == "test_aot_dispatch_dynamic"
    cases = (
        arguments(name, trained=True, few=few) if name == forward else backward_arguments(forward, few=few)
    )
    for args in cases:
        assert opcheck(OPERATORS[name], args, test_utils=utility) == {utility: "SUCCESS"}
