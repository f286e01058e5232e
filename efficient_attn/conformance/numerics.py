"""Checks of numerics: finite, close to float64, precise, and exact softmax where promised."""

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from efficient_attn.conformance.cases import (
    BORDERS,
    BOTH,
    DTYPES,
    HALF,
    HEAD_SIZES,
    LARGE,
    LARGER,
    LENGTHS,
    LONG_BORDERS,
    LONG_QUERIES,
    MANY_PAIRS,
    MODEL,
    TUNED,
    USUAL,
    CheckCase,
    Inputs,
    both,
    everywhere,
    joint,
    vary,
)
from efficient_attn.conformance.records import Finding
from efficient_attn.conformance.subject import (
    ROUNDING,
    Subject,
    close,
    condition,
    decode,
    distance,
    exact,
    gradients,
    largest,
    magnified,
    rounding,
    rounding_step,
    run,
    takes_scale,
)
from efficient_attn.conformance.table import Check, cannot_check

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
# A correct implementation exceeds this many standard errors less than once in 100 000 comparisons.
STANDARD_ERRORS = 4.5
SIZES = (CheckCase(tokens=1), *vary(CheckCase(tokens=16), masked=BOTH), CheckCase(tokens=129, batch=1))
NARROW = ("float32", *HALF)
# Powers of two, which cause no rounding; the scale is divided by their squares, and exceeds 1.
FACTORS = (2.0, 2.0**5, 2.0**-2, 2.0**-4)
# Far beyond Gaussian values, and far below the largest number of float16.
BIG = {"float16": 2.0**12, "bfloat16": 2.0**40, "float32": 2.0**40, "float64": 2.0**40}
# Values near the smallest numbers of float16; in other dtypes they round as usual.
SMALL = {"float16": 2.0**-20, "bfloat16": 2.0**-60, "float32": 2.0**-60, "float64": 2.0**-60}
# Many outputs, whose roundings average out; the scale 1/√7 loses .25 % when it is rounded to bfloat16.
BIASED = CheckCase(tokens=30, batch=8, heads=8, kv_heads=8, head_dim=7, value_dim=32)
# More keys of weight one than half precision can count; their sum overflows float16.
LONG_SUM = CheckCase(tokens=1, keys=70_000, batch=1, heads=1, kv_heads=1, dtype="float16", norm=0.0)


def _exactness(subject: Subject, case: CheckCase, scale: float | None = None) -> Finding:
    """Error against the definition, at most 1e-12 in float64, else twice the error of naive attention."""
    inputs, causal = subject.inputs(case), case.causal
    factor = case.head_dim**-0.5 if scale is None else scale
    expected = exact(inputs.double(), scale=factor, causal=causal)
    out = run(subject.build(case, scale=scale), inputs)
    if case.dtype == "float64":
        return close("Against the definition", out, expected, 1e-12 * max(1.0, largest(inputs.v)))
    # The scale may multiply queries, keys or scores, with different rounding; the loosest is allowed.
    scaled = inputs._replace(q=inputs.q * factor), inputs._replace(k=inputs.k * factor), inputs
    plain = [
        exact(variant, scale=s, causal=causal) for variant, s in zip(scaled, (1.0, 1.0, factor), strict=True)
    ]
    lost = max(distance(variant, expected) for variant in plain)
    # Sums in float32 round at the size of their terms, Σ_j w_ij |v_j|; half precision is summed in float32.
    terms = inputs._replace(v=inputs.v.abs()).double()
    summed = exact(terms, scale=factor, causal=causal) if case.dtype == "float32" else expected
    bound = 2 * (lost if math.isfinite(lost) else 0.0) + 2 * rounding_step(summed.to(inputs.v.dtype))
    return close("Against the definition", out, expected, bound)


SHAPES = (
    CheckCase(tokens=5, heads=4, kv_heads=2, masked=True),
    CheckCase(tokens=5, heads=3, kv_heads=1, value_dim=7),
    CheckCase(tokens=3, keys=8, head_dim=1, value_dim=1),
    CheckCase(tokens=16, head_dim=59, value_dim=64, masked=True),
    CheckCase(tokens=3, head_dim=71, value_dim=136, batch=1),
    CheckCase(tokens=3, head_dim=256, value_dim=71, batch=1),
)
# At large norms rows are one-hot.
EXTREME = (CheckCase(tokens=7), CheckCase(tokens=300, batch=1, heads=1, kv_heads=1))


@Check(
    "The output equals softmax attention up to rounding, for scores of any size.",
    cases=(
        *everywhere(*LENGTHS, 97, dtype=DTYPES),
        *vary(*SHAPES, dtype=DTYPES, causal=BOTH),
        *vary(*TUNED, dtype=("float64", "float32"), causal=BOTH),
        *vary(CheckCase(tokens=1, batch=1, heads=1, kv_heads=1), tokens=(*BORDERS, 1024), causal=BOTH),
        *vary(*LARGE, dtype=DTYPES),
        MANY_PAIRS.but(dtype="float32"),
        *vary(*EXTREME, dtype=("float64", "float32"), norm=(10.0, 100.0, 1000.0), causal=BOTH),
    ),
    drawn=lambda seed: (
        *joint(seed, 5, 40, 200),
        *(case for dtype in NARROW for case in joint(seed, 40, 200, dtype=dtype) if case.batch < 4),
    ),
    long=lambda seed: vary(
        *joint(seed, *LONG_BORDERS),
        *joint(seed, 1025, 2049, dtype="float32"),
        *joint(seed, 1025, 2049, dtype="bfloat16"),
        batch=[1],
        heads=[2],
        kv_heads=[1],
    ),
    capability="exact",
)
def equals_softmax_attention(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    yield _exactness(subject, case)


@Check(
    "The output equals softmax attention at every scale.",
    cases=vary(CheckCase(tokens=7), dtype=("float64", "float32"), head_dim=(4, 128), causal=BOTH),
    capability="exact",
)
def equals_softmax_attention_at_every_scale(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    if not takes_scale(subject.build(case)):
        raise cannot_check("A plain callable takes no scale.")
    for scale in (0.0, 1e-3, 1.0, 30.0, -1e3):
        yield _exactness(subject, case, scale)


@Check(
    "The scale multiplies q·k exactly once: inputs times c at scale s equal inputs at scale c²·s.",
    cases=(
        *vary(CheckCase(tokens=7), head_dim=(4, *HEAD_SIZES), causal=BOTH),
        *both(CheckCase(tokens=200, batch=1, value_dim=3), CheckCase(tokens=1, keys=5)),
        *vary(CheckCase(tokens=7), dtype=HALF),
    ),
    drawn=lambda seed: joint(seed, 9),
)
def scale_is_a_factor_on_the_scores(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, backend, expected, bound = subject.plain_call(case)
    if not takes_scale(backend):
        raise cannot_check("A plain callable declares no scale.")
    default = case.head_dim**-0.5
    yield close("Default scale given", run(subject.build(case, scale=default), inputs), expected, bound)
    for factor in FACTORS:
        moved = inputs._replace(q=inputs.q * factor, k=inputs.k * factor)
        scaled = subject.build(case, scale=default / factor**2)
        yield close(f"Inputs times {factor}", run(scaled, moved), expected, bound)
    still = subject.build(case, scale=0.0, calibrated=False)
    # PyTorch's fused function gives NaN for causal queries at scale 0, which its callers inherit.
    if not (subject.bare or still.needs_calibration):
        zeros = inputs._replace(q=torch.zeros_like(inputs.q))
        yield close("Scale 0, queries of zeros", run(still, inputs), run(still, zeros), bound)


@Check(
    "The output in float32, bfloat16 and float16 has that dtype and is close to float64 on the same inputs.",
    cases=(
        *everywhere(1, 3, 16, 65, dtype=NARROW),
        *everywhere(200, 513, dtype=NARROW, batch=[1]),
        *vary(*both(MODEL), *TUNED[:-1], dtype=NARROW),
    ),
    drawn=lambda seed: tuple(case for dtype in NARROW for case in joint(seed, 9, dtype=dtype)),
)
def narrow_dtypes_lose_only_rounding(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs = subject.inputs(case)
    wide = subject.build(case).double()
    expected = run(wide, inputs.double())
    bound = rounding(wide, inputs.double(), "float32") + 2 * rounding_step(expected.to(inputs.v.dtype))
    if case.dtype in HALF:
        # Rounding of long sums, for which a promise of exactness has a tighter bound.
        plain = (exact(x, scale=case.head_dim**-0.5, causal=case.causal) for x in (inputs, inputs.double()))
        bound = bound + 2 * distance(*plain)
    out = run(subject.build(case), inputs)
    yield Finding(f"{out.dtype} instead of {inputs.q.dtype}", float(out.dtype != inputs.q.dtype), 0.0)
    yield close("Against float64", out, expected, bound)


@Check(
    "Half precision has no bias: no factor on queries, keys or values brings float64 nearer to it.",
    cases=vary(BIASED, dtype=HALF, causal=BOTH),
)
@torch.no_grad()
def half_precision_has_no_bias(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    if case.batch * case.heads < 30:
        return  # too few for a standard error, where a smaller counterexample is searched
    inputs, wide = subject.inputs(case), subject.build(case).double()
    exactly = inputs.double()
    error = run(subject.build(case), inputs).double() - run(wide, exactly)
    for name, x in zip("qkv", exactly[:3], strict=True):
        above, below = (run(wide, exactly._replace(**{name: x * factor})) for factor in (1.0001, 0.9999))
        slope = (above - below) / 2e-4
        # Least squares of each sequence and head, whose roundings are independent with a mean of zero; a
        # small slope determines no factor.
        sizes = slope.square().sum((2, 3))
        factors = ((error * slope).sum((2, 3)) / sizes.clamp_min(sizes.median())).nan_to_num()
        chance = STANDARD_ERRORS * float(factors.std()) / factors.numel() ** 0.5
        # Intermediate results in float32 may be biased by their rounding.
        yield Finding(f"Relative bias of {name}", abs(float(factors.mean())), chance + ROUNDING["float32"])


@Check(
    "Usual head sizes and lengths are no exception: repeated entries and tokens act as at other sizes.",
    cases=both(CheckCase(tokens=16, batch=1)),
)
@torch.inference_mode()
def usual_sizes_are_no_exception(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, _, out, bound = subject.plain_call(case)

    def head_dim(times: int, power: float) -> Tensor:
        q, k, v = (x.repeat(1, 1, 1, times) for x in inputs[:3])
        backend = subject.build(case.but(head_dim=case.head_dim * times))
        return run(backend, Inputs(q * times**power, k * times**power, v, None))[..., : case.value_dim]

    def tokens(times: int, power: float) -> Tensor:
        backend = subject.build(case.but(tokens=case.tokens * times))
        repeated = inputs.each(lambda x: x.repeat_interleave(times, dim=2))
        # The last of equal tokens sees them all.
        return run(backend, repeated)[:, :, times - 1 :: times] * times**power

    # Weights are functions of q·k, or sums over entries without or with a default scale; outputs are averages
    # or sums. The power that holds at smaller and larger unusual sizes decides, unless a window cuts them.
    for call, powers, sizes in ((head_dim, (-0.25, 0.0, 0.25), HEAD_SIZES), (tokens, (0.0, -1.0), USUAL)):
        unit = getattr(case, call.__name__)
        unusual = (3, 5, sizes[-1] // unit + 1)
        fits = [p for p in powers if all(close("", call(n, p), out, bound).holds for n in unusual)]
        for times in (size // unit for size in sizes if fits):
            yield close(f"{call.__name__}={times * unit}", call(times, fits[0]), out, bound)


@Check(
    "Long sums accumulate in float32 or better, in every dtype, and in gradients of values.",
    # A third has no short binary fraction, so that every addition rounds.
    cases=(
        *both(LONG_SUM.but(keys=3000, dtype="bfloat16"), LONG_SUM),
        *vary(LONG_SUM.but(tokens=3000, keys=3), dtype=HALF),
    ),
    needs=("cross",),
)
def long_sums_do_not_stall_in_half_precision(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs = subject.inputs(case)
    inputs = inputs._replace(v=torch.ones_like(inputs.v))
    backend, wide = subject.build(case, learned=None), subject.build(case, learned=None).double()
    expected = run(wide, inputs.double())
    step = rounding_step(expected.to(inputs.v.dtype))
    yield close("Against float64, values 1", run(backend, inputs), expected, 2 * step + 1e-3)
    if case.tokens > 1 and subject.promises.gradients:
        (_, got), (_, summed) = (
            gradients(partial(run, module), x, upstream=1.0)[2]
            for module, x in ((backend, inputs), (wide, inputs.double()))
        )
        bound = 2 * torch.finfo(got.dtype).eps * largest(summed)
        yield Finding("Gradient w.r.t. v", distance(got, summed), bound)


@Check(
    "Outputs are proportional to large and small values in every dtype, and large scores do not overflow.",
    cases=(*everywhere(7, dtype=DTYPES), *everywhere(130, dtype=DTYPES, head_dim=[64], batch=[1])),
)
def large_values_stay_proportional(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    backend, exponents = subject.build(case), torch.finfo(getattr(torch, case.dtype))
    calls: dict[str, Callable[[Inputs], Tensor]] = {"": partial(run, backend)}
    if subject.promises.streaming and case.causal:
        half = case.tokens // 2
        calls[" in two parts"] = lambda inputs: decode(backend, inputs, [half, case.tokens - half])[0]
    size = largest(subject.inputs(case).v)
    for norm, opposed in itertools.product((3.0, 300.0), (False, True)):
        inputs = subject.inputs(case.but(norm=norm))
        inputs = inputs._replace(q=-inputs.k) if opposed else inputs
        worst, spread = largest(run(backend, inputs)), largest(condition(backend, inputs))
        # Signed weights may cancel almost completely; such rows need only be finite.
        most = 2 * size * spread if subject.promises.nonnegative and subject.promises.averages else math.inf
        yield Finding(f"Norm {norm:g}{', opposed' * opposed}", worst, most if worst < math.inf else 0.0)
    for factor, (where, call) in itertools.product((BIG[case.dtype], SMALL[case.dtype]), calls.items()):
        inputs = subject.inputs(case)
        changed = inputs._replace(v=inputs.v * factor)
        # Small values lose digits once, before both calls.
        inputs = inputs._replace(v=changed.v / factor)
        terms = condition(backend, inputs)
        # Signed weights may take an output, or a sum on its way, beyond the largest number.
        fits = 4 * factor * largest(inputs.v) * terms < exponents.max
        bound = (
            rounding(backend, inputs, case.dtype) * factor + exponents.smallest_normal * exponents.eps * terms
        )
        out, scaled = call(inputs).double() * factor, call(changed).double()
        yield close(f"Values times {factor:g}{where}", scaled.where(fits, 0), out.where(fits, 0), bound)


def _cases(dtype: str) -> tuple[CheckCase, ...]:
    return (
        *vary(*SIZES, dtype=[dtype], norm=(0.5, 1.0, 3.0), causal=BOTH),
        *vary(CheckCase(tokens=513, batch=1), dtype=[dtype], causal=BOTH),
        *vary(*LARGER, dtype=[dtype]),
    )


@Check(
    "Computations in float32 use float32 throughout: errors stay below the midpoint between it and float16.",
    cases=_cases("float32"),
)
def float32_is_float32_throughout(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, wide, share = subject.inputs(case), subject.build(case).double(), BETWEEN["float32"]
    with torch.no_grad():
        # Change of every output that relative errors of this share in the inputs and in the sums cause.
        expected, change = run(wide, inputs.double()), magnified(share, wide, inputs.double())
        for seed in range(DRAWS):
            moved = run(wide, noisy(inputs.double(), share, seed))
            change = torch.maximum(change, (moved - expected).abs().amax())
    yield close("Against float64", run(subject.build(case), inputs), expected, 2 * change)


def noisy(inputs: Inputs, share: float, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    noise = (torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in inputs[:3])
    return inputs.of(*(x * (1 + share * n) for x, n in zip(inputs[:3], noise, strict=True)))


@Check(
    "Outputs and gradients in float64 use it throughout: changes of parts in 10⁸ have proportional effects.",
    cases=(*_cases("float64"), LONG_QUERIES.but(norm=0.5)),
)
def float64_is_float64_throughout(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    bound = magnified(BETWEEN["float64"], backend, inputs)
    yield from _proportional("Small steps", partial(run, backend), inputs, bound)
    if not subject.promises.gradients or case.norm != 0.5:
        return

    def flat(inputs: Inputs) -> Tensor:
        return torch.cat([x.flatten() for _, x in gradients(partial(run, backend), inputs)])

    # A gradient contains the square of the denominator, which magnifies rounding once more.
    most = float((bound * condition(backend, inputs)).max()) * max(1.0, largest(flat(inputs)))
    yield from _proportional("Gradients at small steps", flat, inputs, most)


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
    """Central difference along a random direction of one input, so that even powers cancel."""
    above, below = (noisy(inputs, sign * step, direction)._asdict()[name] for sign in (1, -1))
    return call(inputs._replace(**{name: above})) - call(inputs._replace(**{name: below}))
