"""Kernels other than softmax: each is its quadratic formula, to rounding, and says what it is."""

import pytest
import torch
from reference import random_mask, random_qkv, readable

import efficient_attn as ea

OPTIONS = {
    "linear-relu": {"num_features": 12},
    "linear-elu": {},
    "linear-hedgehog": {},
    "linear-taylor-1": {},
    "linear-taylor-2": {},
}
NAMES = pytest.mark.parametrize("name", OPTIONS)


def kernel(backend, x, y):
    """What a query x weighs a key y with, from the definition."""
    name = backend.spec.name
    if name == "linear-relu":
        w = backend.core.features.projection.double()
        one, other = (torch.where(w @ z > 0, w @ z, 0.0) / len(w) ** 0.5 + 1e-3 for z in (x, y))
        return one @ other
    if name == "linear-elu":
        one, other = (torch.where(z > 0, z + 1, z.exp()) for z in (x, y))
        return one @ other
    if name == "linear-hedgehog":
        one, other = (torch.cat([z.softmax(-1), (-z).softmax(-1)]) for z in (x, y))
        return one @ other
    product = x @ y
    return 1 + product + (product**2 / 2 if name.endswith("2") else 0.0)


def quadratic(backend, q, k, v, *, causal=False, key_mask=None):
    rows, root = [], abs(backend.problem.factor) ** 0.5
    sign = 1.0 if backend.problem.factor > 0 else -1.0
    zero = torch.zeros(v.shape[-1], dtype=v.dtype)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            head = h * k.shape[1] // q.shape[1]
            for i in range(q.shape[2]):
                read = readable(i, q.shape[2], k.shape[2], b, None, causal, key_mask)
                x = sign * root * q[b, h, i]
                weights = [kernel(backend, x, root * k[b, head, j]) for j in read]
                total = sum((w * v[b, head, j] for w, j in zip(weights, read, strict=True)), zero)
                rows.append(total / sum(weights) if read else zero)
    return torch.stack(rows).unflatten(0, q.shape[:3])


def inputs(seed=0):
    q, k, v = random_qkv(q_tokens=5, k_tokens=7, head_dim=4, value_dim=3, seed=seed)
    # Short enough that 1 + q·k, which has either sign, is above zero everywhere.
    return 0.3 * q, 0.3 * k, v


@pytest.mark.parametrize("scale", [None, 1.0, -0.3])
@pytest.mark.parametrize("causal", [False, True])
@NAMES
def test_outputs_are_the_quadratic_formula(name, causal, scale):
    q, k, v = inputs()
    mask = random_mask(2, 7)
    backend = ea.build(name, head_dim=4, causal=causal, scale=scale, **OPTIONS[name]).double()
    expected = quadratic(backend, q, k, v, causal=causal, key_mask=mask)
    torch.testing.assert_close(backend(q, k, v, key_mask=mask), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@NAMES
def test_gradients_are_those_of_the_quadratic_formula(name, causal):
    leaves = [x.requires_grad_() for x in inputs(seed=1)]
    backend = ea.build(name, head_dim=4, causal=causal, **OPTIONS[name]).double()
    found = torch.autograd.grad(backend(*leaves).sin().sum(), leaves)
    expected = torch.autograd.grad(quadratic(backend, *leaves, causal=causal).sin().sum(), leaves)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("norm", [1e3, 1e-3])
@NAMES
def test_vectors_of_any_length_overflow_nothing(name, norm):
    q, k, v = random_qkv(q_tokens=9, k_tokens=9)
    wide = ea.build(name, head_dim=8, **OPTIONS[name]).double()
    narrow = ea.build(name, head_dim=8, **OPTIONS[name])
    q, k = (torch.sign(q) * norm, torch.sign(q[:, :2]) * norm)
    out = narrow(q.float(), k.float(), v.float())
    assert out.isfinite().all()
    if ea.spec(name).capabilities.nonnegative:
        # Products of queries with keys, some of them opposed, are rounded at the size of |q||k|.
        assert (out.double() - wide(q, k, v)).abs().max() < 1e-4


def test_they_say_that_they_do_not_approximate_softmax():
    others = {name for name in ea.list_backends() if not ea.spec(name).capabilities.approximates_softmax}
    assert others == set(OPTIONS)
    for name in others:
        assert "a kernel other than softmax" in ea.spec(name).summary
        assert not ea.spec(name).capabilities.exact


def test_kernels_without_a_draw_serve_one_call_and_have_nothing_to_redraw():
    q, k, v = inputs()
    for name in ("linear-elu", "linear-taylor-1", "linear-taylor-2"):
        built = ea.build(name, head_dim=4)
        assert torch.equal(ea.attention(q, k, v, name), built(q, k, v))
        with pytest.raises(ea.UnsupportedError, match="is random; nothing to redraw"):
            built.redraw(1)


def test_the_first_taylor_polynomial_has_negative_weights_and_the_second_none():
    q, k, _ = random_qkv(q_tokens=20, k_tokens=20)
    first, second = (ea.build(f"linear-taylor-{order}", head_dim=8, scale=1.0) for order in (1, 2))
    assert (first.attention_weights(q, k) < 0).any()
    assert (first.denominators(q, k) <= 0).any()
    assert (second.attention_weights(q, k) > 0).all()
    assert (second.denominators(q, k) > 0).all()
