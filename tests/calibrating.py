"""Backends calibrated on queries and keys that are like no Gaussian."""

import pytest
import torch
from reference import random_qkv

import efficient_attn as ea

NAMES = ("performer-oprf", "performer-full")
BOTH = pytest.mark.parametrize("name", NAMES)


def calibrated(name, *, q, k, num_features=12, key_mask=None, **options):
    backend = ea.build(name, head_dim=q.shape[-1], num_features=num_features, **options).double()
    backend.calibrate(q, k, key_mask=key_mask)
    return backend


def typical(q_tokens=40, k_tokens=40, **sizes):
    """Queries and keys with means, and axes of different length."""
    q, k, v = random_qkv(q_tokens=q_tokens, k_tokens=k_tokens, **sizes)
    lengths = torch.linspace(0.4, 1.2, q.shape[-1], dtype=torch.float64)
    return q * lengths + 0.3, k * lengths.flip(0) - 0.5, v
