"""Every registered operator passes all of torch's own checks of a registration."""

import pytest
import torch
from rank_processes import output_of
from reference import random_qkv
from torch.library import opcheck

import efficient_attn as ea
from efficient_attn.ops.linear import causal as linear_causal
from efficient_attn.ops.linear import full as linear_full
from efficient_attn.ops.linear.features import MAPS
from efficient_attn.ops.window import operator as window_operator

UTILITIES = ["test_schema", "test_autograd_registration", "test_faketensor"]
# Symbolic sizes are no integers to the runtime shape checks, which `-m compile` is without.
UTILITIES += [pytest.param("test_aot_dispatch_dynamic", marks=pytest.mark.compile)]
# Operators with their backward passes.
OPERATORS = {
    "full_linear": (linear_full._full, linear_full._full_backward),
    "causal_linear": (linear_causal._causal, linear_causal._causal_backward),
    "window": (window_operator.fused_window, window_operator.fused_window_backward),
}


def arguments(name, dtype, *, masked):
    """Arguments of a forward operator, of each kind of features, on strided tensors where masked."""
    mask = torch.arange(9)[None] >= torch.tensor([[0], [4]]) if masked else None
    q, k, v = (x.to(dtype) for x in random_qkv(2, 4, 2, 9, 9, 4, 4))
    if masked:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    if name == "window":
        yield q, k, v, mask, 2, 1, 0.5
        return
    for kind in ("positive", "trigonometric", "elu"):
        directions = torch.ones(3, 4) if MAPS[kind].per_direction else None
        weights = torch.zeros(2, 1, 3) if kind == "positive" else None
        transforms = torch.ones(2, 2, 5, 4) if kind == "positive" and masked else None
        yield q, k, v, mask, directions, weights, transforms, kind, -0.5


def test_every_registered_operator_is_checked():
    # Derivatives are registered where backends are defined.
    assert ea.list_backends()
    names = (name.split("::") for name in torch._C._dispatch_get_all_op_names())
    both = {name for forward in OPERATORS for name in (forward, f"{forward}_backward")}
    assert {name for namespace, name in names if namespace == "efficient_attn"} == both


@pytest.mark.parametrize("utility", UTILITIES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_torch_finds_nothing_wrong_with_a_registration(name, masked, utility):
    assert ea.list_backends()
    forward, backward = OPERATORS[name]
    # A compilation takes a second.
    compiled = utility == "test_aot_dispatch_dynamic"
    for dtype in (torch.float64,) if compiled else (torch.float32, torch.float64, torch.bfloat16):
        for args in arguments(name, dtype, masked=masked):
            assert opcheck(forward, args, test_utils=utility) == {utility: "SUCCESS"}
            args = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
            outputs = forward(*args)
            upstream = torch.ones_like(outputs[0])
            assert opcheck(backward, (upstream, *outputs, *args), test_utils=utility) == {utility: "SUCCESS"}


@pytest.mark.slow
def test_the_package_imports_no_triton_and_calls_no_compiler():
    code = """
import sys, torch, efficient_attn as ea
x = torch.randn(1, 2, 9, 4, requires_grad=True)
assert "triton" not in sys.modules
for causal in (True, False):
    for name in ("window", "performer-positive"):
        ea.build(name, head_dim=4, causal=causal)(x, x, x).sum().backward()
print("torch._dynamo" in sys.modules)
"""
    assert output_of("-c", code).strip() == "False"
