"""Gradients do not depend on a clamp's derivative at its bounds: 1 before torch 2.15, 0 from there on."""

from operator import gt, lt

import pytest
import torch
from reference import random_qkv
from torch import Tensor

import efficient_attn as ea


def flat_clamp(x, min=None, max=None):  # as torch names them
    """A clamp whose derivative at its bounds is 0."""
    for inside, bound in ((gt, min), (lt, max)):
        x = x if bound is None else torch.where(inside(x, bound), x, bound)
    return x


def steep_clamp(x, min=None, max=None):
    """A clamp whose derivative at its bounds is 1."""
    for outside, bound in ((lt, min), (gt, max)):
        x = x if bound is None else torch.where(outside(x, bound), bound, x)
    return x


@pytest.mark.parametrize("name", ["performer-trig", "linear-taylor-2", "linear-elu", "window-clusters"])
def test_gradients_do_not_depend_on_the_derivative_of_a_clamp_at_its_bounds(name, monkeypatch):
    inputs = random_qkv(q_tokens=40, k_tokens=40)
    # The map of linear-elu has two branches that meet at 0.
    inputs[0][..., ::3, :] = 0.0
    sizes = {"window": 4, "clusters": 4, "probes": 0} if name == "window-clusters" else {}
    backend = ea.build(name, head_dim=8, causal=not sizes, **sizes).double()

    def gradients(clamp):
        for method, bounds in (("clamp", ("min", "max")), ("clamp_min", ("min",)), ("clamp_max", ("max",))):
            monkeypatch.setattr(
                Tensor,
                method,
                lambda x, *given, bounds=bounds, **named: clamp(
                    x, **dict(zip(bounds, given, strict=False)), **named
                ),
            )
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        out = backend(q, k, v) if sizes else backend.extend(q, k, v)[0]
        return torch.autograd.grad(out.sin().sum(), (q, k, v))

    for one, other in zip(gradients(flat_clamp), gradients(steep_clamp), strict=True):
        assert (one - other).abs().max() <= 1e-12 * other.abs().max()
