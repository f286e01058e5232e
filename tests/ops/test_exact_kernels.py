"""Exact attention by named kernels against float64, with a stand-in for FlashAttention 3."""

import sys
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from cpu_flex_attention import eager_flex
from reference import random_mask, random_qkv
from torch._subclasses.fake_tensor import FakeTensorMode

import efficient_attn as ea
from efficient_attn.measure.error import exact_output, relative_error
from efficient_attn.ops import exact_kernels

ON_CUDA = ("flash", "cudnn", "efficient")
MASK = random_mask(2, 600)


def output(kernel, inputs, *, causal=False, key_mask=None):
    return ea.build("exact", head_dim=8, causal=causal, kernel=kernel)(*inputs, key_mask=key_mask)


@pytest.mark.parametrize(
    ("kernel", "causal", "key_mask"),
    [
        *product(("flash", "math", "flex"), (False, True), (None,)),
        *product(("flash", "math"), (False, True), (MASK,)),
        ("flex", False, MASK),
    ],
)
def test_a_kernel_has_the_errors_of_float32(kernel, causal, key_mask):
    inputs = [x.float() for x in random_qkv(q_tokens=600, k_tokens=600)]
    exact = exact_output(*inputs, scale=8**-0.5, causal=causal, key_mask=key_mask)
    with eager_flex():
        out = output(kernel, inputs, causal=causal, key_mask=key_mask)
    assert 1e-8 < relative_error(out, exact) < 1e-6


def test_the_default_is_a_kernel_of_the_list_to_the_bit():
    inputs = [x.float().requires_grad_() for x in random_qkv(kv_heads=4, value_dim=8)]
    results = []
    for kernel in ("default", "flash"):
        out = output(kernel, inputs, causal=True)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    assert all(map(torch.equal, *results))
    assert ea.build("exact", head_dim=8).spec.options_type().kernel == "default"


@pytest.mark.parametrize("kernel", ON_CUDA)
def test_operators_of_cuda_take_the_arguments(kernel, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, f"can_use_{kernel}_attention", lambda parameters: True)
    with FakeTensorMode():
        q, k, v = (torch.empty(2, heads, 96, 8, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
        out = output(kernel, (q, k, v), causal=True)
    assert (out.shape, out.dtype, out.device.type) == (q.shape, q.dtype, "cuda")


def test_a_bias_on_cuda_has_aligned_rows():
    q, k, v = (torch.empty(2, 4, 21, 8, device="meta", dtype=torch.bfloat16) for _ in range(3))
    mask = torch.ones(2, 1, 1, 21, dtype=torch.bool, device="meta")
    assert exact_kernels._bias(mask, q, q.dtype).stride() == (32, 0, 0, 1)
    assert exact_kernels._output("efficient", q, k, v, mask, False, 1.0).shape == q.shape


def test_a_gpu_that_cannot_serve_a_call_names_kernels_that_can():
    with FakeTensorMode():
        q = torch.empty(1, 2, 96, 12, device="cuda", dtype=torch.float32)
        with pytest.raises(ea.UnsupportedError, match=r"multiple of 8, not 12.* call: default, math, flex"):
            ea.build("exact", head_dim=12, kernel="flash")(q, q, q)
        q = torch.empty(1, 2, 96, 8, device="cuda", dtype=torch.float32)
        with pytest.raises(ea.UnsupportedError, match=r"serves no float32 \[1, 2, 96, 8\] here"):
            output("cudnn", (q, q, q))


@pytest.mark.parametrize("returned", [tuple, None])
def test_flash_attention_3_gets_tokens_before_heads(returned, monkeypatch):
    def attend(q, k, v, *, softmax_scale, causal):
        rows = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(*rows, scale=softmax_scale, is_causal=causal).transpose(1, 2)
        return (out, None) if returned else out

    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(flash_attn_func=attend))
    inputs = random_qkv(kv_heads=4, value_dim=8, q_tokens=7)
    out = exact_kernels._output("fa3", *inputs, None, True, 0.3)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(*inputs, scale=0.3, is_causal=True))
