"""Half precision takes no more memory than float32, though it is computed with in float32."""

import pytest
import torch

import efficient_attn as ea
from efficient_attn.measure.memory import peak


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["linformer", "performer-positive", "performer-trig"])
def test_half_precision_takes_no_more_memory_forward_or_backward(name, causal, dtype):
    if causal and not ea.spec(name).capabilities.causal:
        pytest.skip("not causal")
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
