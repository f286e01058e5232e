"""Gradients and second derivatives against finite differences."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.gradcheck import GradcheckError

from efficient_attn.backend import Backend
from efficient_attn.conformance.cases import Case, Inputs, both, joint
from efficient_attn.conformance.compare import distance
from efficient_attn.conformance.precision import BETWEEN
from efficient_attn.conformance.records import Finding
from efficient_attn.conformance.subject import Subject, run
from efficient_attn.conformance.table import Refused, SilentlyWrong, check

# Short vectors keep signed features from cancelling; ill-conditioned rows have no good difference quotient.
TINY = Case(tokens=3, batch=1, heads=1, kv_heads=1, head_dim=2, value_dim=2, norm=0.5)
_KINDS = (
    TINY,
    TINY.but(masked=True),
    TINY.but(heads=2, tokens=4),
    TINY.but(tokens=2, keys=4),
    TINY.but(tokens=5),
)
KINDS = tuple(one for case in _KINDS for one in both(case))


@check(
    "Gradients w.r.t. q, k and v match finite differences, and are the same at every call.",
    cases=KINDS,
    capability="gradients",
)
def gradients_are_those_of_finite_differences(subject: Subject, case: Case) -> Iterator[Finding]:
    leaves, call = _differentiable(subject, case)
    gradcheck(call, leaves, nondet_tol=0.0)
    yield Finding("Finite differences", 0.0, 0.0)


@check(
    "Second derivatives match finite differences, or raise an error if they are not promised.",
    cases=KINDS,
    capability="second_derivatives",
)
def second_derivatives_are_right_or_refused(subject: Subject, case: Case) -> Iterator[Finding]:
    leaves, call = _differentiable(subject, case)
    if subject.promises.second_derivatives:
        gradgradcheck(call, leaves, nondet_tol=0.0)
        yield Finding("Finite differences", 0.0, 0.0)
        return
    try:
        first = torch.autograd.grad(call(*leaves).square().sum(), leaves, create_graph=True)
        torch.autograd.grad([x.square().sum() for x in first], leaves)
    except RuntimeError as error:
        raise Refused("Second derivatives raise an error.") from error
    try:
        gradgradcheck(call, leaves)
    except GradcheckError as error:
        raise SilentlyWrong("Second derivatives are returned, but wrong.") from error
    yield Finding("Finite differences", 0.0, 0.0)


@check(
    "Gradients in half precision are close to float64 on the same inputs.",
    cases=(
        one
        for dtype in ("bfloat16", "float16", "float32")
        for one in both(Case(tokens=7, dtype=dtype, norm=0.5))
    ),
    drawn=lambda seed: tuple(
        case.but(norm=0.5, batch=min(case.batch, 2))
        for case in joint(seed, 9, 70, 200, 513, dtype="float32")
        if case.heads < 4
    ),
    needs=("gradients",),
    beyond="low-precision dtypes",
)
def gradients_in_narrow_dtypes_lose_only_rounding(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    wide, got = subject.build(case).double(), _gradients(backend, inputs)
    wanted = _gradients(wide, inputs.double())
    # A gradient is a sum over tokens of products of rounded numbers.
    steps = 4 * case.tokens * torch.finfo(inputs.q.dtype).eps + 1e-3
    gaps = [distance(one, other) for one, other in zip(got, wanted, strict=True)]
    bounds = [steps * max(1.0, float(other.abs().max())) for other in wanted]
    if any(gap > bound for gap, bound in zip(gaps, bounds, strict=True)):
        bounds = [max(one) for one in zip(bounds, _jumps(wide, inputs.double(), wanted), strict=True)]
    for name, gap, bound in zip("qkv", gaps, bounds, strict=True):
        yield Finding(f"Gradient w.r.t. {name}", gap, bound)


def _jumps(backend: Backend, inputs: Inputs, wanted: tuple[Tensor, ...]) -> list[float]:
    """Twice the largest change of each gradient that changes in the fifth digit of the inputs cause.

    A backend that chooses keys may choose others after rounding, where two of them are nearly tied.
    """
    generator, changes = torch.Generator().manual_seed(0), []
    for _ in range(8):
        noise = (torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in inputs[:3])
        noisy = inputs.of(*(x * (1 + BETWEEN["float32"] * n) for x, n in zip(inputs[:3], noise, strict=True)))
        changes.append(map(distance, _gradients(backend, noisy), wanted))
    return [2 * max(column) for column in zip(*changes, strict=True)]


def _gradients(backend: Backend, inputs: Inputs) -> tuple[Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
    return torch.autograd.grad(run(backend, inputs.of(*leaves)).sum(), leaves)


def _differentiable(subject: Subject, case: Case) -> tuple[list[Tensor], Callable[..., Tensor]]:
    inputs, backend = subject.inputs(case), subject.build(case)
    leaves = [x.requires_grad_() for x in inputs[:3]]
    return leaves, lambda q, k, v: run(backend, Inputs(q, k, v, inputs.key_mask))
