"""Exact attention equals its definition, in every dtype as closely as that dtype allows."""

import math

import pytest
import torch
import torch.nn.functional as F
from reference import random_mask, random_qkv, reference_attention

import efficient_attn as ea
from efficient_attn.measure.memory import peak

EXACT = ("exact", "exact-dense")
SHAPES = [  # batch, heads, kv_heads, q_tokens, k_tokens, head_dim, value_dim
    (1, 1, 1, 1, 1, 1, 1),
    (2, 3, 3, 2, 3, 2, 5),
    (1, 4, 2, 7, 7, 3, 8),
    (2, 2, 1, 16, 31, 8, 8),
    (1, 2, 2, 31, 31, 59, 64),
    (1, 1, 1, 97, 128, 64, 59),
    (1, 2, 1, 129, 129, 16, 16),
]


def plain(q, k, v, scale, causal, key_mask):
    """The formula as anybody would write it, in the dtype of its inputs."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * scale
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~seen, -torch.inf)
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, None, :], -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


def allowed(dtype, q, k, v, reference, scale, causal, key_mask):
    """Twice what the plain formula loses in this dtype, and two steps of rounding the result."""
    same = plain(*(x.to(dtype) for x in (q, k, v)), scale, causal, key_mask).double()
    rounded = reference.to(dtype)
    step = (rounded + 0.3 - 0.3).double() - rounded.double()
    return 2 * (same - reference).abs().max() + 2 * step.abs().max()


@pytest.mark.parametrize("scale", [-1.0, 0.0, 1e-3, None, 30.0])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_exact_attention_equals_the_definition_in_float64(name, shape, causal, masked, scale):
    q, k, v = random_qkv(*shape)
    mask = random_mask(shape[0], shape[4]) if masked else None
    backend = ea.build(name, head_dim=shape[5], causal=causal, scale=scale)
    reference = reference_attention(q, k, v, scale=backend.problem.factor, causal=causal, key_mask=mask)
    error = (backend(q, k, v, key_mask=mask) - reference).abs().max()
    # A score is rounded relative to its size, which for scale 30 is hundreds.
    assert error <= 1e-12 * max(1.0, abs(backend.problem.factor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES[2:], ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_lower_precision_loses_no_more_than_twice_the_plain_formula(name, shape, causal, dtype):
    # The inputs themselves are rounded first, so that only the computation is compared.
    q, k, v = (x.to(dtype).double() for x in random_qkv(*shape))
    mask = random_mask(shape[0], shape[4])
    backend = ea.build(name, head_dim=shape[5], causal=causal)
    scale = backend.problem.factor
    reference = reference_attention(q, k, v, scale=scale, causal=causal, key_mask=mask)
    out = backend(*(x.to(dtype) for x in (q, k, v)), key_mask=mask)
    assert out.dtype is dtype
    bound = allowed(dtype, q, k, v, reference, scale, causal, mask)
    assert (out.double() - reference).abs().max() <= bound


@pytest.mark.parametrize("factor", [1e2, 1e4, 1e6])
@pytest.mark.parametrize("name", EXACT)
def test_extreme_scores_pick_the_value_of_the_largest(name, factor):
    q, k, v = (x.float() for x in random_qkv(1, 2, 2, 5, 9))
    scores = (q * factor).double() @ (k * factor).double().mT
    out = ea.build(name, head_dim=8)(q * factor, k * factor, v)
    picked = v.gather(2, scores.argmax(-1, keepdim=True).expand(-1, -1, -1, v.shape[-1]))
    gap = scores.topk(2).values.diff().abs().min() * 8**-0.5
    # The others together weigh at most 8 · exp(−gap).
    torch.testing.assert_close(out, picked, rtol=0, atol=1e-6 + 16 * math.exp(-gap) * v.abs().max().item())


@pytest.mark.parametrize("name", EXACT)
def test_half_precision_survives_scores_beyond_its_range(name):
    q = torch.full((1, 1, 2, 64), 300.0, dtype=torch.float16)
    v = torch.tensor([[[[1.0], [3.0]]]], dtype=torch.float16)
    assert torch.equal(ea.build(name, head_dim=64)(q, q, v), torch.full_like(v, 2.0))


@pytest.mark.parametrize("name", EXACT)
def test_dropout_drops_at_its_rate_in_training_and_never_in_eval(name):
    torch.manual_seed(0)
    q, k, _ = (x.float() for x in random_qkv(1, 4, 4, 40, 40))
    values = torch.eye(40).expand(1, 4, 40, 40)
    backend = ea.build(name, head_dim=8, dropout=0.25)
    dropped = (backend.train()(q, k, values) == 0).float()
    # Binomial: 6400 weights, each dropped with probability 1/4.
    assert abs(dropped.mean() - 0.25) < 4.5 * math.sqrt(0.25 * 0.75 / dropped.numel())
    before = torch.get_rng_state()
    assert (backend.eval()(q, k, values) != 0).all()
    assert torch.equal(before, torch.get_rng_state())


def test_masks_and_causality_together_take_no_memory_of_tokens_squared():
    backend = ea.build("exact", head_dim=16, causal=True)
    peaks = []
    for tokens in (2048, 4096):
        q = torch.randn(1, 2, tokens, 16)
        mask = torch.arange(tokens)[None] < tokens - 100
        peaks.append(peak(lambda q=q, mask=mask: backend(q, q, q, key_mask=mask), device="cpu").peak_bytes)
    # Twice the tokens, at most a little more than twice the bytes; a mask of tokens² would be four times.
    assert peaks[1] < 2.5 * peaks[0]


@pytest.mark.parametrize("causal", [False, True])
def test_the_kernel_is_asked_for_no_row_without_a_key(monkeypatch, causal):
    masks, kernel = [], F.scaled_dot_product_attention

    def attend(*tensors, attn_mask, **options):
        masks.append(attn_mask)
        return kernel(*tensors, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    mask = torch.arange(7) >= torch.tensor([[3], [7]])
    ea.build("exact", head_dim=8, causal=causal)(*random_qkv(2, 2, 1, 7, 7), key_mask=mask)
    assert masks and all(mask.any(dim=-1).all() for mask in masks)


def test_weights_of_half_precision_come_in_float32_unrounded():
    q, k, _ = (x.bfloat16() for x in random_qkv(1, 2, 1, 7, 7))
    backend = ea.build("exact", head_dim=8)
    assert torch.equal(backend.attention_weights(q, k), backend.attention_weights(q.float(), k.float()))
