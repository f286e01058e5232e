"""Numerics: exact softmax where promised; finite, and close to float64, everywhere."""

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter

import torch

from efficient_attn.backend import Backend
from efficient_attn.conformance.cases import (
    BORDERS,
    LARGE,
    LENGTHS,
    LONG_BORDERS,
    MANY_PAIRS,
    Case,
    Inputs,
    both,
    everywhere,
    joint,
    of_models,
)
from efficient_attn.conformance.compare import (
    close,
    condition,
    distance,
    exact,
    largest,
    rounding,
    rounding_step,
)
from efficient_attn.conformance.masks import padded_with
from efficient_attn.conformance.records import Finding
from efficient_attn.conformance.streams import decode
from efficient_attn.conformance.subject import Subject, run, takes_scale
from efficient_attn.conformance.table import CannotCheck, Check

HALF = ("bfloat16", "float16")
NARROW = ("float32", *HALF)
# Powers of two, which cause no rounding; the scale is divided by their squares, and exceeds 1.
FACTORS = (2.0, 2.0**5, 2.0**-2, 2.0**-4)
# Factor on the default scale for each norm of the sizes of models.
SCALES = {1.0: 1.0, 0.3: -1.0, 2.0: 0.7}
# Far beyond Gaussian values, and far below the largest number of float16.
BIG = {"float16": 2.0**12, "bfloat16": 2.0**40, "float32": 2.0**40, "float64": 2.0**40}
# Values near the smallest numbers of float16; in other dtypes they round as usual.
SMALL = {"float16": 2.0**-20, "bfloat16": 2.0**-60, "float32": 2.0**-60, "float64": 2.0**-60}
# More keys of weight one than half precision can count; their sum overflows float16.
LONG_SUM = 70_000


def softmax_bound(inputs: Inputs, expected: torch.Tensor, *, scale: float, causal: bool, dtype: str) -> float:
    """Error bound of an exact backend: 1e-12 in float64, else twice the error of naive attention."""
    if dtype == "float64":
        return 1e-12 * max(1.0, largest(inputs.v))
    # The scale may multiply queries, keys or scores, with different rounding; the loosest is allowed.
    scaled = inputs._replace(q=inputs.q * scale), inputs._replace(k=inputs.k * scale), inputs
    plain = [
        exact(variant, scale=s, causal=causal) for variant, s in zip(scaled, (1.0, 1.0, scale), strict=True)
    ]
    lost = max(distance(variant, expected) for variant in plain)
    # Sums in float32 round at the size of their terms, Σ_j w_ij |v_j|; half precision is summed in float32.
    terms = inputs._replace(v=inputs.v.abs()).double()
    summed = exact(terms, scale=scale, causal=causal) if dtype == "float32" else expected
    return 2 * (lost if math.isfinite(lost) else 0.0) + 2 * rounding_step(summed.to(inputs.v.dtype))


def _exactness(subject: Subject, case: Case, scale: float | None = None) -> Finding:
    inputs = subject.inputs(case)
    factor = case.head_dim**-0.5 if scale is None else scale
    expected = exact(inputs.double(), scale=factor, causal=case.causal)
    bound = softmax_bound(inputs, expected, scale=factor, causal=case.causal, dtype=case.dtype)
    return close("Against the definition", run(subject.build(case, scale=scale), inputs), expected, bound)


def _shapes(*, dtype: str) -> tuple[Case, ...]:
    ordinary = everywhere(*LENGTHS, 97, dtype=dtype)
    special = (
        Case(tokens=5, heads=4, kv_heads=2, masked=True, dtype=dtype),
        Case(tokens=5, heads=3, kv_heads=1, value_dim=7, dtype=dtype),
        Case(tokens=3, keys=8, head_dim=1, value_dim=1, dtype=dtype),
        Case(tokens=16, head_dim=59, value_dim=64, masked=True, dtype=dtype),
        Case(tokens=3, head_dim=128, batch=1, dtype=dtype),
        Case(tokens=3, head_dim=71, value_dim=136, batch=1, dtype=dtype),
        Case(tokens=3, head_dim=256, value_dim=71, batch=1, dtype=dtype),
    )
    return *ordinary, *(variant for case in special for variant in both(case))


@Check(
    "The output equals softmax attention up to rounding.",
    cases=(
        *(case for dtype in ("float64", *NARROW) for case in _shapes(dtype=dtype)),
        *(case for n in BORDERS for case in both(Case(tokens=n, batch=1, heads=1, kv_heads=1))),
        *(case.but(dtype=dtype) for dtype in ("float64", *NARROW) for case in LARGE),
        MANY_PAIRS.but(dtype="float32"),
    ),
    drawn=lambda seed: (
        *joint(seed, 5, 40, 200),
        *(case for dtype in NARROW for case in joint(seed, 40, 200, dtype=dtype) if case.batch < 4),
    ),
    long=lambda seed: tuple(
        case.but(batch=1, heads=2, kv_heads=1)
        for dtype, lengths in (
            ("float64", LONG_BORDERS),
            ("float32", (1025, 2049)),
            ("bfloat16", (1025, 2049)),
        )
        for case in joint(seed, *lengths, dtype=dtype)
    ),
    capability="exact",
)
def equals_softmax_attention(subject: Subject, case: Case) -> Iterator[Finding]:
    yield _exactness(subject, case)


@Check(
    "The output equals softmax attention at every scale.",
    cases=(
        variant
        for dtype in ("float64", "float32")
        for head_dim in (4, 128)
        for variant in both(Case(tokens=7, dtype=dtype, head_dim=head_dim))
    ),
    needs=("exact",),
)
def equals_softmax_attention_at_every_scale(subject: Subject, case: Case) -> Iterator[Finding]:
    if not takes_scale(subject.build(case)):
        raise CannotCheck("A plain callable takes no scale.")
    for scale in (0.0, 1e-3, 1.0, 30.0, -1e3):
        yield _exactness(subject, case, scale)


@Check(
    "The output equals softmax attention for scores of any size, with one-hot rows, and stays finite.",
    cases=(
        variant
        for dtype in ("float64", "float32")
        for case in (Case(tokens=7), Case(tokens=300, batch=1, heads=1, kv_heads=1))
        for norm in (10.0, 100.0, 1000.0)
        for variant in both(case.but(dtype=dtype, norm=norm))
    ),
    needs=("exact",),
)
def extreme_scores_stay_softmax(subject: Subject, case: Case) -> Iterator[Finding]:
    yield _exactness(subject, case)


@Check(
    "The scale multiplies q·k exactly once: inputs times c at scale s equal inputs at scale c²·s.",
    cases=(
        *(variant for head_dim in (4, 64, 80, 128) for variant in both(Case(tokens=7, head_dim=head_dim))),
        *both(Case(tokens=200, batch=1, value_dim=3)),
        *both(Case(tokens=1, keys=5)),
    ),
    drawn=lambda seed: joint(seed, 9),
)
def scale_is_a_factor_on_the_scores(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, default = subject.inputs(case), case.head_dim**-0.5
    backend = subject.build(case)
    if not takes_scale(backend):
        raise CannotCheck("A plain callable declares no scale.")
    expected, bound = run(backend, inputs), rounding(backend, inputs, case.dtype)
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
    "The output in float32, bfloat16 and float16 is close to float64 on the same inputs.",
    cases=(
        *(case for dtype in NARROW for case in everywhere(1, 3, 16, 65, dtype=dtype)),
        *(variant.but(batch=1) for dtype in NARROW for variant in everywhere(200, 513, dtype=dtype)),
    ),
    drawn=lambda seed: tuple(case for dtype in NARROW for case in joint(seed, 9, dtype=dtype)),
    beyond="low-precision dtypes",
)
def narrow_dtypes_lose_only_rounding(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs = subject.inputs(case)
    wide = subject.build(case).double()
    expected = run(wide, inputs.double())
    bound = _narrow_bound(wide, inputs, expected, case)
    yield close("Against float64", run(subject.build(case), inputs), expected, bound)


def _narrow_bound(wide: Backend, inputs: Inputs, expected: torch.Tensor, case: Case) -> torch.Tensor:
    bound = rounding(wide, inputs.double(), "float32") + 2 * rounding_step(expected.to(inputs.v.dtype))
    if case.dtype in HALF:
        # Rounding of long sums, for which a promise of exactness has a tighter bound.
        plain = (exact(x, scale=case.head_dim**-0.5, causal=case.causal) for x in (inputs, inputs.double()))
        bound = bound + 2 * distance(*plain)
    return bound


@Check(
    "At sizes and layouts of real models, outputs and decoded parts equal float64 calls of single sequences.",
    drawn=of_models,
    beyond="low-precision dtypes",
)
def sizes_of_models_are_single_calls(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, scale = subject.inputs(case), SCALES[case.norm] * case.head_dim**-0.5
    backend, wide = (subject.build(case, scale=scale) for _ in range(2))
    if not takes_scale(backend):
        backend, wide = (subject.build(case) for _ in range(2))
    wide = wide.double()
    # Each sequence alone, with a key head for every query head.
    group = case.heads // case.kv_heads
    k, v = (x.repeat_interleave(group, dim=1) for x in inputs[1:3])
    single = [inputs.of(inputs.q, k, v).double().each(itemgetter(slice(b, b + 1))) for b in range(case.batch)]
    expected = torch.cat([run(wide, alone) for alone in single])
    bound = rounding(wide, inputs.double(), case.dtype)
    if case.dtype in NARROW:
        bound = _narrow_bound(wide, inputs, expected, case)
    # Models project to [batch, tokens, heads, dim], and the padding of a batch may hold anything.
    arranged = inputs if inputs.key_mask is None else padded_with(1e4, inputs)
    arranged = arranged.of(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in arranged[:3]))
    yield close("Sequence by sequence", run(backend, arranged), expected, bound)
    if subject.promises.gradients:
        leaves = [x.detach().requires_grad_() for x in arranged[:3]]
        yield close("In training", run(backend, arranged.of(*leaves)), expected, bound)
    if subject.promises.streaming and case.causal and case.keys is None:
        state = None
        for part in (slice(0, 1), slice(1, case.tokens // 2), slice(case.tokens // 2, case.tokens)):
            q, k, v = (x[:, :, part] for x in arranged[:3])
            mask = None if arranged.key_mask is None else arranged.key_mask[:, part]
            out, state = backend.extend(q, k, v, state, key_mask=mask)
            yield close(f"Extended from {part.start}", out, expected[:, :, part], bound[:, :, part])


@Check(
    "Long sums accumulate in float32 or better, in every dtype.",
    cases=(
        variant
        for dtype, keys in (("bfloat16", 3000), ("float16", LONG_SUM))
        for variant in both(Case(tokens=1, keys=keys, batch=1, heads=1, kv_heads=1, dtype=dtype, norm=0.0))
    ),
    needs=("cross",),
    beyond="low-precision dtypes",
)
def long_sums_do_not_stall_in_half_precision(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs = subject.inputs(case)
    inputs = inputs._replace(v=torch.ones_like(inputs.v))
    expected = run(subject.build(case, learned=None).double(), inputs.double())
    step = rounding_step(expected.to(inputs.v.dtype))
    yield close(
        "Against float64, values 1", run(subject.build(case, learned=None), inputs), expected, 2 * step + 1e-3
    )


@Check(
    "Large and small values give large and small outputs: both are proportional in every dtype.",
    cases=(
        variant
        for dtype in ("float64", *NARROW)
        for case in (Case(tokens=7, dtype=dtype), Case(tokens=130, head_dim=64, batch=1, dtype=dtype))
        for variant in (*both(case), *both(case.but(masked=True)))
    ),
    beyond="low-precision dtypes",
)
def large_values_stay_proportional(subject: Subject, case: Case) -> Iterator[Finding]:
    backend, exponents = subject.build(case), torch.finfo(getattr(torch, case.dtype))
    calls: dict[str, Callable[[Inputs], torch.Tensor]] = {"": partial(run, backend)}
    if subject.promises.streaming and case.causal:
        half = case.tokens // 2
        calls[" in two parts"] = lambda inputs: decode(backend, inputs, [half, case.tokens - half])[0]
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


@Check(
    "Large scores in half precision, and queries opposed to every key, cause no overflow.",
    cases=(
        variant
        for dtype in ("float64", *NARROW)
        for case in (Case(tokens=7), Case(tokens=200, batch=1, heads=1, kv_heads=1))
        for norm in (3.0, 300.0)
        for variant in both(case.but(dtype=dtype, norm=norm))
    ),
)
def large_inputs_stay_finite(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    size = largest(inputs.v) * float(condition(backend, inputs).max())
    for where, variant in (("Random", inputs), ("Opposed", inputs._replace(q=-inputs.k))):
        out = run(backend, variant)
        # Signed weights may cancel almost completely; such rows need only be finite.
        bound = 2 * size if subject.promises.nonnegative and subject.promises.averages else math.inf
        yield Finding(where, largest(out), bound if largest(out) < math.inf else 0.0)
