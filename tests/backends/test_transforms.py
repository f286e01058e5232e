"""Backends inside the transforms of torch.func, against autograd and loops of single calls."""

from collections.abc import Callable

import pytest
import torch
from small_backends import FORMS, small_backend
from torch import Tensor
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import functional_call, grad, jvp, stack_module_state, vmap

import efficient_attn as ea

# torch calls kernels without a batching rule entry by entry, and warns that this is slow.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")

TOKENS, HEAD_DIM, ENTRIES = 9, 4, 3
# Forms made of operators of torch, which have forward derivatives.
DIFFERENTIABLE = ("exact-dense", "window", "oracle-topk", "bigbird", "block-topk")
EVERY = pytest.mark.parametrize(("name", "causal"), FORMS)


def built(name: str, causal: bool, **options: int) -> ea.Backend:
    size = {"window": 5, "window-clusters": 2}.get(name, 6)
    sizes = {"head_dim": HEAD_DIM, "kv_heads": 1, "max_tokens": 12}
    return small_backend(name, size, causal=causal, **sizes, **options)


def inputs(seed: int = 0, heads: int = 1) -> list[Tensor]:
    """q, k and v of several calls, [calls batch heads tokens dim]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(ENTRIES, 2, h, TOKENS, HEAD_DIM) for h in (heads, 1, 1)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def masks() -> Tensor:
    mask = torch.rand(ENTRIES, 2, TOKENS, generator=torch.Generator().manual_seed(2)) < 0.7
    # One entry sees no key at all.
    mask[1, 0] = False
    return mask


def loss(backend: ea.Backend) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        return backend(q, k, v, key_mask=key_mask).sin().sum()

    return call


def gradients(backend: ea.Backend, *tensors: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    return list(torch.autograd.grad(loss(backend)(*leaves, *tensors[3:]), leaves))


def assert_equal(actual: object, expected: object) -> None:
    # Folded into one batch or not, sums are taken in another order.
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-11)


@EVERY
def test_vmap_gives_the_calls_and_gradients_of_single_calls(name, causal):
    backend, tensors = built(name, causal), [*inputs(heads=2), masks()]
    call = lambda q, k, v, m: backend(q, k, v, key_mask=m)  # noqa: E731
    entries = list(zip(*tensors, strict=True))
    assert_equal(vmap(call)(*tensors), torch.stack([call(*entry) for entry in entries]))
    # Any axis may be the mapped axis, and an argument may have none.
    q, k, v, mask = tensors
    mapped = vmap(call, in_dims=(2, None, 1, None))(q.movedim(0, 2), k[0], v.movedim(0, 1), mask[0])
    assert_equal(mapped, torch.stack([call(q[i], k[0], v[i], mask[0]) for i in range(ENTRIES)]))
    # Gradients of a mapped call, and a mapped call of gradients.
    parts = zip(*(gradients(backend, *entry) for entry in entries), strict=True)
    expected = [torch.stack(part) for part in parts]
    assert_equal(list(vmap(grad(loss(backend), (0, 1, 2)))(*tensors)), expected)
    together = grad(lambda *x: vmap(loss(backend))(*x, mask).sum(), (0, 1, 2))
    assert_equal(list(together(q, k, v)), expected)


@pytest.mark.parametrize(
    ("name", "causal"),
    [case for case in FORMS if case[0] in ("linformer", "performer-positive", "performer-trig")],
)
def test_an_ensemble_of_models_is_mapped_over_its_parameters_and_directions(name, causal):
    models = [
        built(name, causal, **({} if name == "linformer" else {"seed": number})) for number in range(ENTRIES)
    ]
    for number, model in enumerate(models):
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    state, tensors = stack_module_state(models), [x[0] for x in inputs()]

    def of_model(parameters: dict, buffers: dict, q: Tensor) -> Tensor:
        return functional_call(models[0], (parameters, buffers), (q, *tensors[1:])).sin().sum()

    expected = [gradients(model, *tensors)[0] for model in models]
    assert_equal(vmap(grad(of_model, 2), in_dims=(0, 0, None))(*state, tensors[0]), torch.stack(expected))


# torch's own forward mode compiles its decompositions in a way that it calls deprecated.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@EVERY
def test_forward_mode_derivatives_are_right_or_refused_and_never_zero(name, causal):
    backend, (q, k, v) = built(name, causal), [x[0] for x in inputs()]
    tangent = torch.randn(q.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    cotangent = torch.randn(v.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    leaf = q.clone().requires_grad_()
    (by_q,) = torch.autograd.grad(backend(leaf, k, v), leaf, cotangent)

    def by_transform() -> Tensor:
        return jvp(lambda q: backend(q, k, v), (q,), (tangent,))[1]

    def by_dual_numbers() -> Tensor | None:
        with dual_level():
            return unpack_dual(backend(make_dual(q, tangent), k, v)).tangent

    for derivative in (by_transform, by_dual_numbers):
        if name in DIFFERENTIABLE:
            value = derivative()
            assert value is not None
            assert_equal((value * cotangent).sum(), (by_q * tangent).sum())
        else:
            # Our refusal, or that of torch's fused kernel.
            with pytest.raises(NotImplementedError, match=r"no forward-mode derivatives|forward AD"):
                derivative()
