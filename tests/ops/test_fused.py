"""Causal exact attention with a key mask: padding costs no mask, and other masks stay as they are."""

import pytest
import torch
from reference import assert_near, random_qkv, relative_error
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import efficient_attn as ea
from efficient_attn.measure.memory import peak
from efficient_attn.ops.softmax import fused

AT = torch.arange(40)
LENGTHS = torch.tensor([[33], [33], [20], [0], [40], [1]])
PADDED = {
    "right": AT < LENGTHS,
    "left": AT >= 40 - LENGTHS,
    "both": (AT < LENGTHS) & (AT >= 2),
    "none": AT.expand(6, -1) >= 0,
    "all": AT.expand(6, -1) < 0,
}


def outputs(backend, tensors, mask):
    """The output without gradients, with gradients, and the gradients."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = backend(*leaves, key_mask=mask)
    gradients = torch.autograd.grad((out * torch.arange(1, out.shape[-1] + 1)).sum(), leaves)
    with torch.no_grad():
        return [backend(*tensors, key_mask=mask), out.detach(), *gradients]


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("name", PADDED)
def test_padding_is_left_out_without_a_mask(monkeypatch, name, kv_heads):
    tensors = random_qkv(6, 4, kv_heads, 40, 40)
    exact, dense = (ea.build(backend, head_dim=8, causal=True) for backend in ("exact", "exact-dense"))
    monkeypatch.delattr(fused, "_visible")
    actual, expected = (outputs(x, tensors, PADDED[name]) for x in (exact, dense))
    assert_near(actual, expected, 1e-12)


def test_padding_holds_a_third_more_memory_at_most():
    at, lengths = torch.arange(1024), torch.tensor([[700], [1000]])
    backend = ea.build("exact", head_dim=16, causal=True)
    q, k, v = (x.float().requires_grad_() for x in random_qkv(2, 4, 4, 1024, 1024, 16, 16))

    def peaks(mask):
        with torch.no_grad():
            forward = peak(lambda: backend(q, k, v, key_mask=mask), device="cpu").peak_bytes
        both = lambda: torch.autograd.grad(backend(q, k, v, key_mask=mask).sum(), (q, k, v))  # noqa: E731
        return forward, peak(both, device="cpu").peak_bytes

    plain, masks = (
        peaks(None),
        [at.expand(2, -1) >= 0, at < lengths, at >= lengths - 700, at.expand(2, -1) < 1000],
    )
    for mask, bounds in zip(masks, [(1.02, 1.02), (1.15, 1.06), (1.15, 1.06), (1.3, 1.25)], strict=True):
        assert all(x <= y * z for x, y, z in zip(peaks(mask), bounds, plain, strict=True))


def test_gradients_of_shared_heads_are_rounded_once():
    tensors, mask = random_qkv(2, 8, 1, 300, 300), torch.arange(300) < torch.tensor([[200], [300]])
    backend = ea.build("exact", head_dim=8, causal=True)
    rounded = [x.bfloat16() for x in tensors]
    actual, expected = (outputs(backend, x, mask) for x in (rounded, [x.double() for x in rounded]))
    assert all(relative_error(x, y) < 4e-3 for x, y in zip(actual, expected, strict=True))


def test_a_traced_or_abstract_mask_is_not_read(monkeypatch):
    q, k, v = random_qkv(6, 4, 4, 40, 40)
    backend = ea.build("exact", head_dim=8, causal=True)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v, PADDED["left"])]
        assert backend(*fakes[:3], key_mask=fakes[3]).shape == v.shape
    left, right = PADDED["left"], PADDED["right"]
    graph = make_fx(lambda mask: backend(q, k, v, key_mask=mask))(left)
    assert_near([graph(right)], [backend(q, k, v, key_mask=right)], 1e-12)
    monkeypatch.setattr(torch.jit, "is_tracing", lambda: True)
    monkeypatch.delattr(fused, "real_spans")
    assert backend(q, k, v, key_mask=PADDED["left"]).shape == v.shape
