"""Half precision takes no more memory than float32, though it is computed with in float32."""

import pytest
import torch

import efficient_attn as ea
from efficient_attn.measure.memory import peak

# Float16 products and the many operations of causal chunks take seconds.
CASES = [
    pytest.param(name, causal, dtype, marks=[pytest.mark.slow] * (causal or dtype is torch.float16))
    for dtype in (torch.bfloat16, torch.float16)
    for name, causal in [
        *[("linformer", False), ("performer-positive", False), ("performer-trig", False)],
        *[("performer-positive", True), ("performer-trig", True)],
    ]
]


@pytest.mark.parametrize(("name", "causal", "dtype"), CASES)
def test_half_precision_takes_no_more_memory_forward_or_backward(name, causal, dtype):
    backend = ea.build(name, head_dim=16, causal=causal, max_tokens=4096)
    inputs = [torch.randn(1, 1, 4096, 16) for _ in range(3)]

    def peaks():
        leaves = [x.clone().requires_grad_() for x in inputs]
        with torch.no_grad():
            forward = peak(lambda: backend(*leaves), device="cpu").peak_bytes
        both = peak(lambda: torch.autograd.grad(backend(*leaves).sum(), leaves), device="cpu").peak_bytes
        return forward, both

    wide = peaks()
    inputs = [x.to(dtype) for x in inputs]
    half = peaks()
    assert half[0] <= wide[0]
    assert half[1] <= wide[1]
