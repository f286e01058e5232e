"""Compiled, exported and traced backends at several lengths, against their eager calls."""

import pytest
import torch
from torch import nn

import efficient_attn as ea

# A trace warns of the shapes that it takes for constants.
pytestmark = [
    pytest.mark.compile,
    pytest.mark.filterwarnings(
        "ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace:DeprecationWarning"
    ),
]
HEADS, HEAD_DIM = 4, 8
# A window of 33 tokens is longer than some lengths.
LENGTHS = (40, 24, 25, 26, 64)
# Each length is a program of its own.
FIXED = ("bigbird", "block-topk", "window-clusters")
CASES = [
    (name, causal, masked)
    for number, name in enumerate(ea.list_backends())
    for causal in (False, True)
    for masked in ((False, True) if name in ("exact", "window") else ((number + causal) % 2 == 0,))
    if ea.spec(name).capabilities.causal >= causal
]


class Masked(nn.Module):
    """A backend whose mask is a positional argument, as traces need it."""

    def __init__(self, name, causal):
        super().__init__()
        size = ea.spec(name).size_option
        sizes = {} if size is None else {size: {"window": 33, "clusters": 2, "block": 16}.get(size, 6)}
        sizes |= {"num_heads": HEADS, "max_tokens": max(LENGTHS)}
        self.backend = ea.build(name, head_dim=HEAD_DIM, causal=causal, **sizes).eval()
        if self.backend.needs_calibration:
            self.backend.calibrate(*inputs(64, False)[:2])

    def forward(self, q, k, v, key_mask=None):
        return self.backend(q, k, v, key_mask=key_mask)


def inputs(tokens, masked):
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = (torch.randn(2, heads, tokens, HEAD_DIM, generator=generator) for heads in (HEADS, 2, 2))
    return (q, k, v, torch.rand(2, tokens, generator=generator) < 0.7) if masked else (q, k, v)


def assert_equal_at(lengths, call, module, masked):
    for tokens in lengths:
        tensors = inputs(tokens, masked)
        torch.testing.assert_close(call(*tensors), module(*tensors), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "causal", "masked"), CASES)
@torch._dynamo.config.patch(recompile_limit=4)
@torch.no_grad()
def test_a_compiled_backend_serves_later_lengths(name, causal, masked):
    module, fixed = Masked(name, causal), name in FIXED
    for dynamic, lengths in ((None, LENGTHS[: 2 if fixed else None]), (True, LENGTHS[: 1 if fixed else 2])):
        torch.compiler.reset()
        compiled = torch.compile(module, fullgraph=True, backend="eager", dynamic=dynamic)
        assert_equal_at(lengths, compiled, module, masked)


@pytest.mark.parametrize(("name", "causal", "masked"), CASES)
def test_an_exported_backend_serves_all_lengths_or_says_that_its_length_is_fixed(name, causal, masked):
    module, tensors = Masked(name, causal), inputs(40, masked)
    traced = torch.jit.trace(module, tensors, check_trace=False)
    assert_equal_at((40,), traced, module, masked)
    tokens = torch.export.Dim("tokens", min=8, max=64)
    shapes = {"dynamic_shapes": ({2: tokens},) * 3 + ({1: tokens},) * masked, "strict": causal}
    if name in FIXED:
        with pytest.raises(torch._dynamo.exc.UserError, match=r"tokens as dynamic .* specialized"):
            torch.export.export(module, tensors, **shapes)
    else:
        program = torch.export.export(module, tensors, **shapes)
        assert_equal_at((40, 8, 64), program.module(), module, masked)
