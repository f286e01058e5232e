"""Gradients and second derivatives: finite differences, narrow dtypes, frozen inputs."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.gradcheck import GradcheckError

from efficient_attn.backend import Backend
from efficient_attn.conformance.cases import (
    GROUPS,
    LARGE,
    LARGE_BATCH,
    TUNED,
    WIDE,
    CheckCase,
    Inputs,
    both,
    joint,
    vary,
)
from efficient_attn.conformance.numerics import BETWEEN, DRAWS, noisy
from efficient_attn.conformance.records import BROKEN, KEPT, NOT_PROMISED, Finding
from efficient_attn.conformance.subject import (
    Subject,
    agree,
    distance,
    gradients,
    largest,
    rounding,
    run,
)
from efficient_attn.conformance.table import Check, Ended

# Short vectors keep signed features from cancelling; ill-conditioned rows have no good difference quotient.
GENTLE = 0.5
TINY = CheckCase(tokens=3, batch=1, heads=1, kv_heads=1, head_dim=2, value_dim=2, norm=GENTLE)
# Factors on Gaussian keys; at 50, exponents of positive features exceed the digits of float32.
LENGTHS = {"float64": (8.0, 50.0), "float32": (8.0,)}
# Upstream gradients under loss scaling, and of a mean over many tokens.
FLOWING = {"float16": (1.0, 2.0**14, 2.0**-13), "bfloat16": (1.0, 2.0**40, 2.0**-40), "float32": (1.0,)}
KINDS = both(
    TINY,
    TINY.but(masked=True),
    TINY.but(heads=2, tokens=4),
    TINY.but(tokens=2, keys=4),
    TINY.but(tokens=5),
)

# Step and number of directions of difference quotients.
STEP, DIRECTIONS = 1e-5, 3
COLUMNS = CheckCase(tokens=4, batch=1, norm=GENTLE)
BORDER = CheckCase(tokens=129, batch=1, heads=2, kv_heads=1, value_dim=3, norm=GENTLE)
# Lengths at and beyond usual block sizes, with every setting that affects gradients.
BEYOND = both(BORDER.but(masked=True), BORDER.but(tokens=256), BORDER.but(tokens=513, masked=True))


@Check(
    "Gradients w.r.t. q, k and v match finite differences, and are the same at every call.",
    cases=KINDS,
    capability="gradients",
)
def gradients_are_those_of_finite_differences(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    leaves, call = _differentiable(subject, case)
    gradcheck(call, leaves, nondet_tol=0.0)
    yield Finding("Finite differences", 0.0, 0.0)


@Check(
    "Second derivatives match finite differences, or raise an error if they are not promised.",
    cases=KINDS,
    drawn=lambda seed: tuple(case.but(norm=0.5) for case in joint(seed, 3)),
    capability="second_derivatives",
)
def second_derivatives_are_right_or_refused(subject: Subject, case: CheckCase) -> Iterator[Finding]:
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
        raise Ended(NOT_PROMISED, "Second derivatives raise an error.") from error
    try:
        gradgradcheck(call, leaves)
    except GradcheckError as error:
        raise Ended(BROKEN, f"Second derivatives are returned, but wrong. On {case}.") from error
    yield Finding("Finite differences", 0.0, 0.0)


@Check(
    "An input that is changed before the backward pass raises an error, or changes no gradient.",
    cases=both(CheckCase(tokens=7, norm=0.5), CheckCase(tokens=130, batch=1, norm=0.5, dtype="float32")),
    needs=("gradients",),
)
def a_change_before_the_backward_pass_is_noticed(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    expected = gradients(partial(run, backend), inputs, upstream=1.0)
    # Another address may take another path of a kernel, which rounds differently.
    eps = 64 * torch.finfo(inputs.q.dtype).eps
    for name in "qkv":

        def changed(traced: Inputs, name: str = name) -> Tensor:
            copies = traced.each(torch.clone)
            out = run(backend, copies)
            copies._asdict()[name].detach().mul_(2.0)
            return out

        with suppress(RuntimeError):
            actual = gradients(changed, inputs, upstream=1.0)
            yield from agree(f"after a change of {name}", actual, expected, eps)


@Check(
    "Gradients in half precision are close to float64 on the same inputs, for any size of the upstream one.",
    cases=vary(
        CheckCase(tokens=7, norm=0.5),
        CheckCase(tokens=130, batch=1, value_dim=8, norm=0.5),
        dtype=("bfloat16", "float16", "float32"),
        causal=(False, True),
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
)
def gradients_in_narrow_dtypes_lose_only_rounding(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    wide, limits = subject.build(case).double(), torch.finfo(inputs.q.dtype)
    # A gradient is a sum over tokens of products of rounded numbers, whose errors are independent.
    steps = 4 * case.k_tokens**0.5 * limits.eps + (BETWEEN["float32"] if case.dtype == "float32" else 1e-3)
    for factor in FLOWING[case.dtype]:
        actual, expected = (
            _gradients(module, x, factor) for module, x in ((backend, inputs), (wide, inputs.double()))
        )
        # Entries beyond the largest number have no comparison.
        actual = [x.where(y.abs() < limits.max / 2, 0) for x, y in zip(actual, expected, strict=True)]
        expected = [y.where(y.abs() < limits.max / 2, 0) for y in expected]
        gaps = [distance(x, y) for x, y in zip(actual, expected, strict=True)]
        least = limits.smallest_normal * limits.eps * case.k_tokens
        bounds = [steps * max(factor, largest(y)) + least for y in expected]
        if any(gap > bound for gap, bound in zip(gaps, bounds, strict=True)) and factor == 1:
            bounds = [max(pair) for pair in zip(bounds, _jumps(wide, inputs.double(), expected), strict=True)]
        for name, gap, bound in zip("qkv", gaps, bounds, strict=True):
            yield Finding(f"Gradient w.r.t. {name}, upstream {factor:g}", gap, bound)


def _jumps(backend: Backend, inputs: Inputs, expected: list[Tensor]) -> list[float]:
    """Twice the largest change of each gradient under changes of the fifth digit of the inputs.

    After rounding, a backend that selects keys may select others if two are nearly tied.
    """
    changes = []
    for seed in range(DRAWS):
        moved = _gradients(backend, noisy(inputs, BETWEEN["float32"], seed))
        changes.append(list(map(distance, moved, expected)))
    return [2 * max(column) for column in zip(*changes, strict=True)]


@Check(
    "Every column of q, k and v affects the output, at any head dimension.",
    cases=(
        *vary(COLUMNS, head_dim=(3, 16, 32, 64, 71, 80, 96, 128, 160, 256, 257)),
        # The last input, since keys that no query reads end the check.
        COLUMNS.but(tokens=130),
    ),
    needs=("gradients",),
)
def every_column_is_read(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    computed = _gradients(subject.build(case), subject.inputs(case))
    for name, gradient in zip("qkv", computed, strict=True):
        read = gradient.abs().amax(dim=(0, 1, 2)) > 0
        # A function may read no query or key at all.
        unread = float((~read).sum()) if read.any() else 0.0
        yield Finding(f"Columns of {name} without a gradient", unread, 0.0)
    ignored = int((torch.cat(computed[1:], dim=-1) == 0).all(dim=-1).all(dim=1).sum())
    if ignored and case.tokens > COLUMNS.tokens:
        raise Ended(KEPT, f"{ignored} of {case.k_tokens} keys have no gradient: no query reads them.")


@Check(
    "Gradients at long keys match finite differences in float64, and float64 in float32.",
    cases=vary(
        CheckCase(tokens=7, batch=1, kv_heads=1),
        CheckCase(tokens=70, batch=1, kv_heads=1, masked=True),
        dtype=("float64", "float32"),
        causal=(False, True),
    ),
    drawn=lambda seed: tuple(case for case in joint(seed, 9, dtype="float32") if case.head_dim > 2),
    needs=("gradients",),
)
def gradients_hold_at_long_keys(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    wide = subject.build(case).double()
    for length in LENGTHS[case.dtype]:
        inputs = subject.inputs(case)
        # Queries are short, so that the softmax of long keys is not one-hot.
        inputs = inputs._replace(q=inputs.q / length, k=inputs.k * length)
        where = f"Keys of norm {length * case.head_dim**0.5:g}"
        if case.dtype == "float64":
            finding = along_directions(subject, wide, case, inputs)
            yield finding._replace(where=f"{where}: {finding.where}")
            continue
        if not subject.promises.nonnegative:
            continue  # a signed denominator may be a small difference of features, even for one key
        actual, expected = _gradients(subject.build(case), inputs), _gradients(wide, inputs.double())
        changes = _jumps(wide, inputs.double(), expected)
        for name, x, y, change in zip("qkv", actual, expected, changes, strict=True):
            # A gradient may be a small difference of terms as long as the keys.
            bound = change + 2 * BETWEEN["float32"] * max(1.0, largest(inputs.k), largest(y))
            yield Finding(f"{where}, gradient w.r.t. {name}", distance(x, y), bound)


def _gradients(backend: Backend, inputs: Inputs, factor: float = 1.0) -> list[Tensor]:
    return [x for _, x in gradients(partial(run, backend), inputs, upstream=factor)]


def _differentiable(subject: Subject, case: CheckCase) -> tuple[list[Tensor], Callable[..., Tensor]]:
    inputs, backend = subject.inputs(case), subject.build(case)
    leaves = [x.requires_grad_() for x in inputs[:3]]
    return leaves, lambda q, k, v: run(backend, Inputs(q, k, v, inputs.key_mask))


@Check(
    "Gradients w.r.t. q, k, v and parameters match finite differences, for all settings and lengths.",
    cases=BEYOND,
    drawn=lambda seed: (
        *(case.but(norm=GENTLE) for case in joint(seed, 2, 6, 33)),
        *both(GROUPS, WIDE),
        *vary(*TUNED[:-1], BORDER.but(tokens=1024), norm=[GENTLE]),
        LARGE_BATCH.but(batch=40, norm=GENTLE),
        *LARGE,
    ),
    long=lambda seed: (BORDER.but(tokens=2100, masked=True), BORDER.but(tokens=2100, causal=True)),
    needs=("gradients",),
)
def gradients_hold_at_every_shape(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    if case.dtype not in subject.promises.dtypes:
        return
    backend = subject.rescaled(case) if case.masked else subject.build(case)
    yield along_directions(subject, backend.train(), case)


def along_directions(
    subject: Subject, backend: Backend, case: CheckCase, inputs: Inputs | None = None
) -> Finding:
    """The first direction along which the derivative holds, or the last one."""
    for direction in range(DIRECTIONS):
        # A kink spoils the difference quotient of one direction; a wrong gradient is wrong along all of them.
        finding = _along(subject, backend, case, direction, inputs)
        if finding.holds:
            break
    return finding


def _along(
    subject: Subject, backend: Backend, case: CheckCase, direction: int, inputs: Inputs | None = None
) -> Finding:
    """Compare a directional derivative of a weighted sum of outputs with difference quotients."""
    inputs = subject.inputs(case, variant=2 * direction) if inputs is None else inputs
    dq, dk, dv, _ = subject.inputs(case, variant=2 * direction + 1)
    leaves = [x.requires_grad_() for x in inputs[:3]]
    learned: list[Tensor] = list(backend.parameters())
    generator = torch.Generator().manual_seed(direction)
    moves = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in learned]
    out = run(backend, inputs)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
    gradients = torch.autograd.grad((out * weights).sum(), [*leaves, *learned], allow_unused=True)
    pairs = zip(gradients, (dq, dk, dv, *moves), strict=True)
    slope = float(sum((g * d).sum() for g, d in pairs if g is not None))

    @torch.no_grad()
    def quotient(step: float) -> float:
        sums = []
        for change in (step, -step):
            for x, move in zip(learned, moves, strict=True):
                x.add_(move, alpha=change)
            at = inputs.of(*(x + change * d for x, d in zip(leaves, (dq, dk, dv), strict=True)))
            sums.append(float((run(backend, at) * weights).sum()))
            for x, move in zip(learned, moves, strict=True):
                x.add_(move, alpha=-change)
        return (sums[0] - sums[1]) / (2 * step)

    near, far = quotient(STEP), quotient(2 * STEP)
    # The two quotients differ by three times the error of the smaller step; rounding is divided by the step.
    noise = float((rounding(backend, inputs, case.dtype) * weights.abs()).sum()) / STEP
    return Finding("Along a random direction", abs(slope - near), abs(far - near) + noise)


@Check(
    "Gradients do not depend on which of q, k, v and the parameters require them.",
    cases=vary(*BEYOND, dtype=("float64", "float32")),
    drawn=lambda seed: (*joint(seed, 6), *joint(seed, 6, dtype="float32")),
    needs=("gradients",),
)
def frozen_inputs(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, backend, _, bounds = subject.plain_call(case)
    call, bound = partial(run, backend), float(bounds.max())
    expected = gradients(call, inputs, learned=backend)
    # The parameters, all together, are a fourth input that may be frozen.
    with_parameters = (False, True) if any(True for _ in backend.parameters()) else (False,)
    for asking in itertools.product((False, True), (False, True), (False, True), with_parameters):
        if any(asking):
            backend.requires_grad_(asking[3])
            computed = gradients(call, inputs, learned=backend, asking=asking[:3])
            backend.requires_grad_(True)
            names = [name for name, _ in computed]
            letters = "".join(letter for letter, asks in zip("qkv", asking, strict=False) if asks)
            where = f"where {letters or 'none'}{' and parameters' * asking[3]} require it"
            yield from agree(where, computed, [pair for pair in expected if pair[0] in names], bound)
