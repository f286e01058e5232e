"""Kernels other than softmax: vectors of any length, what they say of themselves, and learned maps."""

import pytest
import torch
from reference import random_qkv

import efficient_attn as ea

OPTIONS = {
    "linear-relu": {"num_features": 12},
    "linear-elu": {},
    "linear-hedgehog": {},
    "linear-taylor-1": {},
    "linear-taylor-2": {},
}


def inputs(seed=0):
    q, k, v = random_qkv(q_tokens=5, k_tokens=7, head_dim=4, value_dim=3, seed=seed)
    # Short enough that 1 + q·k, which has either sign, is above zero everywhere.
    return 0.3 * q, 0.3 * k, v


def test_they_say_that_they_do_not_approximate_softmax():
    rest = {name for name in ea.list_backends() if not ea.spec(name).capabilities.approximates_softmax}
    assert rest == set(OPTIONS)
    for name in rest:
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


def test_all_heads_start_from_the_identity():
    q, k, v = random_qkv()
    shared, each = (ea.build("linear-hedgehog", head_dim=8, num_heads=n).double() for n in (None, 4))
    assert torch.equal(each.core.features.key_weight, torch.eye(8).double().expand(4, 8, 8))
    torch.testing.assert_close(shared(q, k, v), each(q, k, v))
    assert sum(p.numel() for p in each.parameters()) == 4 * 2 * (8 * 8 + 8)


def test_unknown_features_are_refused():
    with pytest.raises(ea.UnknownNameError, match=r"called 'relu'\. Known: exponential, softmax"):
        ea.build("linear-hedgehog", head_dim=8, features="relu")
