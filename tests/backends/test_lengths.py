"""Compiled, exported and traced backends at several lengths, against their eager calls."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import efficient_attn as ea

pytestmark = pytest.mark.compile

HEADS, HEAD_DIM, LONGEST = 4, 8, 64
# More lengths than torch compiles programs. A window of 33 tokens is longer than most.
LENGTHS = (40, 24, 25, 26, 27, 28, 29, 30, 31, 64)
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

    def __init__(self, name: str, causal: bool) -> None:
        super().__init__()
        size = ea.spec(name).size_option
        sizes = {} if size is None else {size: {"window": 33, "clusters": 2, "block": 16}.get(size, 6)}
        sizes |= {"num_heads": HEADS, "max_tokens": LONGEST}
        self.backend = ea.build(name, head_dim=HEAD_DIM, causal=causal, **sizes).eval()
        if self.backend.needs_calibration:
            self.backend.calibrate(*inputs(LONGEST, False)[:2])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        return self.backend(q, k, v, key_mask=key_mask)


def inputs(tokens: int, masked: bool) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    heads = (HEADS, HEADS // 2, HEADS // 2)
    q, k, v = (torch.randn(2, h, tokens, HEAD_DIM, generator=generator) for h in heads)
    return (q, k, v, torch.rand(2, tokens, generator=generator) < 0.7) if masked else (q, k, v)


def assert_equal_at(lengths: tuple[int, ...], call: Callable, module: nn.Module, masked: bool) -> None:
    for tensors in (inputs(tokens, masked) for tokens in lengths):
        torch.testing.assert_close(call(*tensors), module(*tensors), rtol=1e-4, atol=1e-5)


EVERY = pytest.mark.parametrize(("name", "causal", "masked"), CASES)


@EVERY
@torch.no_grad()
def test_a_compiled_backend_serves_later_lengths(name, causal, masked):
    module, fixed = Masked(name, causal), name in FIXED
    for dynamic, lengths in ((None, LENGTHS[: 2 if fixed else None]), (True, LENGTHS[: 1 if fixed else 2])):
        torch.compiler.reset()
        compiled = torch.compile(module, fullgraph=True, backend="eager", dynamic=dynamic)
        assert_equal_at(lengths, compiled, module, masked)


@EVERY
def test_an_exported_backend_serves_all_lengths_or_says_that_its_length_is_fixed(name, causal, masked):
    module, tensors = Masked(name, causal), inputs(LENGTHS[0], masked)
    tokens = torch.export.Dim("tokens", min=8, max=LONGEST)
    shapes = ({2: tokens},) * 3 + ({1: tokens},) * masked
    for strict in (False, True) if name == "exact" else (causal,):
        if name in FIXED:
            with pytest.raises(torch._dynamo.exc.UserError, match=r"tokens as dynamic .* specialized"):
                torch.export.export(module, tensors, dynamic_shapes=shapes, strict=strict)
        else:
            program = torch.export.export(module, tensors, dynamic_shapes=shapes, strict=strict)
            assert_equal_at((40, 8, LONGEST), program.module(), module, masked)


# A trace warns of the shapes that it takes for constants.
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@EVERY
def test_a_traced_backend_serves_its_length(name, causal, masked):
    module = Masked(name, causal)
    traced = torch.jit.trace(module, inputs(24, masked), check_trace=False)
    assert_equal_at((24,), traced, module, masked)
