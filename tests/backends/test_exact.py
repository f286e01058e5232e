"""Exact attention: dropout, the rows that its kernel is asked for, and its memory."""

import math

import pytest
import torch
import torch.nn.functional as F
from reference import random_qkv

import efficient_attn as ea
from efficient_attn.measure.memory import peak


@pytest.mark.parametrize("name", ["exact", "exact-dense"])
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
