"""Transforms of torch.func and forward-mode derivatives are refused, and never silently zero."""

import pytest
from reference import random_qkv
from torch.autograd.forward_ad import dual_level, make_dual
from torch.func import grad, jvp, vmap

import efficient_attn as ea


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("name", ["exact-dense", "window", "performer-positive"])
def test_transforms_and_forward_mode_are_refused_by_name(name):
    backend = ea.build(name, head_dim=8).double()
    q, k, v = random_qkv(2, 2, 2, 9, 9)
    refused = pytest.raises(ea.UnsupportedError, match=r"no transforms of torch\.func .*autograd\.grad")
    for call in (
        lambda: vmap(lambda x: backend(x[None], k[:1], v[:1]))(q),
        lambda: grad(lambda x: backend(x, k, v).sum())(q),
        lambda: jvp(lambda x: backend(x, k, v), (q,), (q,)),
    ):
        with refused:
            call()
    with dual_level(), refused:
        backend(make_dual(q, q), k, v)
