"""Hedgehog: the formula of the paper with trained maps, its gradients, and the maps that it starts from."""

import pytest
import torch
from reference import random_qkv

import efficient_attn as ea

FEATURES = pytest.mark.parametrize("features", ["softmax", "exponential"])


def trained(features, *, num_heads=4, causal=False):
    """A backend whose maps differ from head to head."""
    backend = ea.build(
        "linear-hedgehog", head_dim=8, num_heads=num_heads, causal=causal, features=features
    ).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in backend.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return backend


def feature_map(features, x, weight, bias):
    """Section 4.2, one row at a time."""
    y = torch.stack([weight @ row + bias for row in x])
    if features == "exponential":
        return torch.cat([y.exp(), (-y).exp()], dim=-1)
    return torch.cat([y.exp() / y.exp().sum(-1, True), (-y).exp() / (-y).exp().sum(-1, True)], dim=-1)


def quadratic(backend, features, q, k, v, *, causal, real):
    maps, heads, root = backend.core.features, [], 8**-0.25
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            own = h if len(maps.query_weight) > 1 else 0
            key_head = h * k.shape[1] // q.shape[1]
            x = feature_map(features, root * q[b, h], maps.query_weight[own], maps.query_bias[own, 0])
            y = feature_map(features, root * k[b, key_head], maps.key_weight[own], maps.key_bias[own, 0])
            weights = (x @ y.mT) * real[b].double()
            weights = weights.tril(k.shape[2] - q.shape[2]) if causal else weights
            heads.append(weights @ v[b, key_head] / weights.sum(-1, True))
    return torch.stack(heads).unflatten(0, q.shape[:2])


@FEATURES
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_heads", [None, 4])
def test_outputs_and_gradients_of_all_parameters_are_those_of_the_formula(features, causal, num_heads):
    q, k, v = random_qkv(q_tokens=6, k_tokens=9, kv_heads=2)
    real = torch.ones(len(k), 9, dtype=torch.bool)
    real[0, 2] = False
    backend = trained(features, causal=causal, num_heads=num_heads)
    q.requires_grad_()
    leaves = [*backend.parameters(), q]
    expected = quadratic(backend, features, q, k, v, causal=causal, real=real)
    k = k.clone()
    # A masked key never matters, nor does it reach the gradient of a map.
    k[0, :, 2] = torch.nan
    found = backend(q, k, v, key_mask=real)
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected.square().sum(), leaves)
    for gradient, other in zip(torch.autograd.grad(found.square().sum(), leaves), wanted, strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(gradient, other)


def test_all_heads_start_from_the_identity():
    q, k, v = random_qkv()
    one, each = (ea.build("linear-hedgehog", head_dim=8, num_heads=n).double() for n in (None, 4))
    assert torch.equal(each.core.features.key_weight, torch.eye(8).double().expand(4, 8, 8))
    torch.testing.assert_close(one(q, k, v), each(q, k, v))
    assert sum(p.numel() for p in each.parameters()) == 4 * 2 * (8 * 8 + 8)


def test_unknown_features_are_refused():
    with pytest.raises(ea.UnknownNameError, match=r"called 'relu'\. Known: exponential, softmax"):
        ea.build("linear-hedgehog", head_dim=8, features="relu")
