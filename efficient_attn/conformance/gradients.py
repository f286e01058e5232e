"""Gradients and second derivatives against finite differences."""

from collections.abc import Callable, Iterator
from contextlib import suppress

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.gradcheck import GradcheckError

from efficient_attn.backend import Backend
from efficient_attn.conformance.cases import Case, Inputs, both, joint
from efficient_attn.conformance.compare import distance, largest
from efficient_attn.conformance.joint import DIRECTIONS, along
from efficient_attn.conformance.precision import BETWEEN, DRAWS, noisy
from efficient_attn.conformance.records import Finding
from efficient_attn.conformance.subject import Subject, run
from efficient_attn.conformance.table import Check, Refused, SilentlyWrong

# Short vectors keep signed features from cancelling; ill-conditioned rows have no good difference quotient.
TINY = Case(tokens=3, batch=1, heads=1, kv_heads=1, head_dim=2, value_dim=2, norm=0.5)
# Factors on Gaussian keys; at 50, exponents of positive features exceed the digits of float32.
LENGTHS = {"float64": (8.0, 50.0), "float32": (8.0,)}
# Upstream gradients under loss scaling, and of a mean over many tokens.
FLOWING = {"float16": (1.0, 2.0**14, 2.0**-13), "bfloat16": (1.0, 2.0**40, 2.0**-40), "float32": (1.0,)}
_KINDS = (
    TINY,
    TINY.but(masked=True),
    TINY.but(heads=2, tokens=4),
    TINY.but(tokens=2, keys=4),
    TINY.but(tokens=5),
)
KINDS = tuple(variant for case in _KINDS for variant in both(case))


@Check(
    "Gradients w.r.t. q, k and v match finite differences, and are the same at every call.",
    cases=KINDS,
    capability="gradients",
)
def gradients_are_those_of_finite_differences(subject: Subject, case: Case) -> Iterator[Finding]:
    leaves, call = _differentiable(subject, case)
    gradcheck(call, leaves, nondet_tol=0.0)
    yield Finding("Finite differences", 0.0, 0.0)


@Check(
    "Second derivatives match finite differences, or raise an error if they are not promised.",
    cases=KINDS,
    drawn=lambda seed: tuple(case.but(norm=0.5) for case in joint(seed, 3)),
    capability="second_derivatives",
)
def second_derivatives_are_right_or_refused(subject: Subject, case: Case) -> Iterator[Finding]:
    leaves, call = _differentiable(subject, case)
    if subject.promises.second_derivatives:
        # Entry by entry for tiny inputs, and along a random direction for larger ones.
        gradgradcheck(call, leaves, nondet_tol=0.0, fast_mode=case not in KINDS)
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


@Check(
    "An input that is changed before the backward pass raises an error, or changes no gradient.",
    cases=(*both(Case(tokens=7, norm=0.5)), *both(Case(tokens=130, batch=1, norm=0.5, dtype="float32"))),
    needs=("gradients",),
)
def a_change_before_the_backward_pass_is_noticed(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    expected = _gradients(backend, inputs)
    # Another address may take another path of a kernel, which rounds differently.
    eps = 64 * torch.finfo(inputs.q.dtype).eps
    for changed in range(3):
        leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
        copies = [x.clone() for x in leaves]
        total = run(backend, inputs.of(*copies)).sum()
        copies[changed].detach().mul_(2.0)
        with suppress(RuntimeError):
            actual = torch.autograd.grad(total, leaves)
            for name, x, y in zip("qkv", actual, expected, strict=True):
                where = f"Gradient w.r.t. {name} after a change of {'qkv'[changed]}"
                yield Finding(where, distance(x, y), eps * max(1.0, largest(y)))


@Check(
    "Gradients in half precision are close to float64 on the same inputs, for any size of the upstream one.",
    cases=(
        variant
        for dtype in ("bfloat16", "float16", "float32")
        for case in (Case(tokens=7, dtype=dtype), Case(tokens=130, batch=1, value_dim=8, dtype=dtype))
        for variant in both(case.but(norm=0.5))
    ),
    drawn=lambda seed: tuple(
        case.but(norm=0.5, batch=min(case.batch, 2))
        for case in (
            *joint(seed, 9, 70, 200, 513, dtype="float32"),
            *(case for dtype in ("bfloat16", "float16") for case in joint(seed, 9, dtype=dtype)),
        )
        if case.heads < 4 or case.dtype != "float32"
    ),
    needs=("gradients",),
    beyond="low-precision dtypes",
)
def gradients_in_narrow_dtypes_lose_only_rounding(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    wide, limits = subject.build(case).double(), torch.finfo(inputs.q.dtype)
    # A gradient is a sum over tokens of products of rounded numbers, whose errors are independent.
    steps = 4 * case.k_tokens**0.5 * limits.eps + (BETWEEN["float32"] if case.dtype == "float32" else 1e-3)
    for factor in FLOWING[case.dtype]:
        actual, expected = (
            _gradients(module, x, factor) for module, x in ((backend, inputs), (wide, inputs.double()))
        )
        # Entries beyond the largest number have no comparison.
        actual = tuple(x.where(y.abs() < limits.max / 2, 0) for x, y in zip(actual, expected, strict=True))
        expected = tuple(y.where(y.abs() < limits.max / 2, 0) for y in expected)
        gaps = [distance(x, y) for x, y in zip(actual, expected, strict=True)]
        least = limits.smallest_normal * limits.eps * case.k_tokens
        bounds = [steps * max(factor, largest(y)) + least for y in expected]
        if any(gap > bound for gap, bound in zip(gaps, bounds, strict=True)) and factor == 1:
            bounds = [max(pair) for pair in zip(bounds, _jumps(wide, inputs.double(), expected), strict=True)]
        for name, gap, bound in zip("qkv", gaps, bounds, strict=True):
            yield Finding(f"Gradient w.r.t. {name}, upstream {factor:g}", gap, bound)


def _jumps(backend: Backend, inputs: Inputs, expected: tuple[Tensor, ...]) -> list[float]:
    """Twice the largest change of each gradient that changes in the fifth digit of the inputs cause.

    A backend that chooses keys may choose others after rounding, where two of them are nearly tied.
    """
    changes = []
    for seed in range(DRAWS):
        moved = _gradients(backend, noisy(inputs, BETWEEN["float32"], seed))
        changes.append(list(map(distance, moved, expected)))
    return [2 * max(column) for column in zip(*changes, strict=True)]


@Check(
    "Gradients of values sum thousands of queries in float32 or better.",
    cases=tuple(
        # A third has no short binary fraction, so that every addition rounds.
        Case(tokens=3000, keys=3, batch=1, heads=1, kv_heads=1, dtype=dtype, norm=0.0)
        for dtype in ("bfloat16", "float16")
    ),
    needs=("gradients", "cross"),
    beyond="low-precision dtypes",
)
def gradients_of_values_do_not_stall(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs = subject.inputs(case)
    got = _gradients(subject.build(case, learned=None), inputs)[2]
    expected = _gradients(subject.build(case, learned=None).double(), inputs.double())[2]
    bound = 2 * torch.finfo(got.dtype).eps * largest(expected)
    yield Finding("Gradient w.r.t. v", distance(got, expected), bound)


@Check(
    "No entry of a query or key is left out, at any head dimension.",
    cases=tuple(Case(tokens=4, batch=1, head_dim=size, norm=0.5) for size in (3, 71, 160, 256, 257)),
    needs=("gradients",),
)
def every_entry_is_read(subject: Subject, case: Case) -> Iterator[Finding]:
    for name, gradient in zip("qk", _gradients(subject.build(case), subject.inputs(case)), strict=False):
        read = gradient.abs().amax(dim=(0, 1, 2)) > 0
        # A function may read no query or key at all.
        left_out = float((~read).sum()) if read.any() else 0.0
        yield Finding(f"Entries of {name} without a gradient", left_out, 0.0)


@Check(
    "Gradients at long keys match finite differences in float64, and float64 in float32.",
    cases=tuple(
        variant
        for dtype in ("float64", "float32")
        for tokens, masked in ((7, False), (70, True))
        for variant in both(Case(tokens=tokens, batch=1, kv_heads=1, masked=masked, dtype=dtype))
    ),
    drawn=lambda seed: tuple(case for case in joint(seed, 9, dtype="float32") if case.head_dim > 2),
    needs=("gradients",),
    beyond="low-precision dtypes",
)
def gradients_hold_at_long_keys(subject: Subject, case: Case) -> Iterator[Finding]:
    wide = subject.build(case).double()
    for length in LENGTHS[case.dtype]:
        inputs = subject.inputs(case)
        # Queries are short, so that the softmax of long keys is not one-hot.
        inputs = inputs._replace(q=inputs.q / length, k=inputs.k * length)
        where = f"Keys of norm {length * case.head_dim**0.5:g}"
        if case.dtype == "float64":
            finding = None
            for direction in range(DIRECTIONS):
                finding = along(subject, wide, case, direction, inputs)
                if finding.holds:
                    break
            assert finding is not None
            yield finding._replace(where=f"{where}: {finding.where}")
            continue
        if not subject.promises.nonnegative:
            continue  # a signed denominator may be a small difference of features, even for one key
        expected = _gradients(wide, inputs.double())
        moved = [_gradients(wide, noisy(inputs.double(), BETWEEN["float32"], seed)) for seed in range(DRAWS)]
        for number, got in enumerate(_gradients(subject.build(case), inputs)):
            change = max(distance(draw[number], expected[number]) for draw in moved)
            # A gradient may be a small difference of terms as long as the keys.
            size = max(1.0, largest(inputs.k), largest(expected[number]))
            bound = 2 * (change + BETWEEN["float32"] * size)
            yield Finding(f"{where}, gradient w.r.t. {'qkv'[number]}", distance(got, expected[number]), bound)


def _gradients(backend: Backend, inputs: Inputs, factor: float = 1.0) -> tuple[Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
    out = run(backend, inputs.of(*leaves))
    return torch.autograd.grad(out, leaves, torch.full_like(out, factor))


def _differentiable(subject: Subject, case: Case) -> tuple[list[Tensor], Callable[..., Tensor]]:
    inputs, backend = subject.inputs(case), subject.build(case)
    leaves = [x.requires_grad_() for x in inputs[:3]]
    return leaves, lambda q, k, v: run(backend, Inputs(q, k, v, inputs.key_mask))
