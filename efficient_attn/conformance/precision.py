"""Precision: computations in float64 and float32 use that dtype throughout."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from efficient_attn.backend import Backend
from efficient_attn.conformance.cases import LONG_KEYS, LONG_QUERIES, Case, Inputs, both
from efficient_attn.conformance.compare import close, condition, largest, magnified
from efficient_attn.conformance.records import Finding
from efficient_attn.conformance.subject import Subject, run
from efficient_attn.conformance.table import Check

# Geometric mean of the epsilons of a dtype and the next lower one: far from the rounding of either.
BETWEEN = {
    "float64": math.sqrt(torch.finfo(torch.float64).eps * torch.finfo(torch.float32).eps),
    "float32": math.sqrt(torch.finfo(torch.float32).eps * torch.finfo(torch.float16).eps),
}
# Small enough that differences are linear in the step, and close to the resolution of float32.
STEP = 3e-8
DIRECTIONS = 2
# Tolerance for features that nearly cancel, whose outputs are sensitive: the cube of the difference bounds
# curvature, and the difference divided by the step, in units of 1e-16, bounds rounding.
CURVATURE, ROUNDINGS = 10, 1000 * 1e-16 / STEP
DRAWS = 3
SIZES = (Case(tokens=1), Case(tokens=16), Case(tokens=16, masked=True), Case(tokens=129, batch=1))
NORMS = (0.5, 1.0, 3.0)


def _cases(dtype: str) -> tuple[Case, ...]:
    cases = [case.but(dtype=dtype, norm=norm) for case in SIZES for norm in NORMS]
    cases.append(Case(tokens=513, batch=1, dtype=dtype))
    large = (case.but(dtype=dtype) for case in (*LONG_KEYS, LONG_QUERIES))
    return *(case for shape in cases for case in both(shape)), *large


@Check(
    "Computations in float32 use float32 throughout: errors stay below the midpoint between it and float16.",
    cases=_cases("float32"),
    beyond="low-precision dtypes",
)
def float32_is_float32_throughout(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs = subject.inputs(case)
    wide = subject.build(case).double()
    expected = run(wide, inputs.double())
    bound = _moved(wide, inputs.double(), BETWEEN["float32"])
    yield close("Against float64", run(subject.build(case), inputs), expected, bound)


@torch.no_grad()
def _moved(backend: Backend, inputs: Inputs, share: float) -> Tensor:
    """Change of every output that relative errors `share` in the inputs and in the sums cause."""
    expected, change = run(backend, inputs), magnified(share, backend, inputs)
    for seed in range(DRAWS):
        change = torch.maximum(change, (run(backend, noisy(inputs, share, seed)) - expected).abs().amax())
    return 2 * change


def noisy(inputs: Inputs, share: float, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    noise = (torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in inputs[:3])
    return inputs.of(*(x * (1 + share * n) for x, n in zip(inputs[:3], noise, strict=True)))


@Check(
    "Computations in float64 use float64 throughout: changes of parts in 10⁸ have proportional effects.",
    cases=_cases("float64"),
)
def float64_is_float64_throughout(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    bound = magnified(BETWEEN["float64"], backend, inputs)
    yield from _proportional("Small steps", partial(run, backend), inputs, bound)


@Check(
    "Gradients in float64 use float64 throughout: changes of parts in 10⁸ have proportional effects.",
    cases=(
        *(variant for case in SIZES[2:] for variant in both(case.but(norm=0.5))),
        LONG_QUERIES.but(norm=0.5),
    ),
    needs=("gradients",),
)
def gradients_in_float64_are_float64_throughout(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)

    def gradients(inputs: Inputs) -> Tensor:
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        with torch.enable_grad():
            total = run(backend, inputs.of(*leaves)).square().sum()
        return torch.cat([x.flatten() for x in torch.autograd.grad(total, leaves)])

    # A gradient contains the square of the denominator, which magnifies rounding once more.
    bound = magnified(BETWEEN["float64"], backend, inputs) * condition(backend, inputs)
    most = float(bound.max()) * max(1.0, largest(gradients(inputs)))
    yield from _proportional("Gradients at small steps", gradients, inputs, most)


def _proportional(
    where: str, call: Callable[[Inputs], Tensor], inputs: Inputs, bound: float | Tensor
) -> Iterator[Finding]:
    """Compare the effect of a small step of each input with half the effect of a step twice as long."""
    for name in ("q", "k", "v"):
        # A kink spoils the difference along one direction; a lower precision shows along all of them.
        for direction in range(DIRECTIONS):
            short, long = (_difference(call, inputs, name, n * STEP, direction) for n in (1, 2))
            slack = CURVATURE * long.abs() ** 3 + ROUNDINGS * long.abs()
            finding = close(f"{where} of {name}", long, 2 * short, bound + slack)
            if finding.holds:
                break
        yield finding


@torch.no_grad()
def _difference(
    call: Callable[[Inputs], Tensor], inputs: Inputs, name: str, step: float, direction: int
) -> Tensor:
    """Central difference along a random direction of one input; even powers cancel."""
    above, below = (noisy(inputs, sign * step, direction)._asdict()[name] for sign in (1, -1))
    return call(inputs._replace(**{name: above})) - call(inputs._replace(**{name: below}))
