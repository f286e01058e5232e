"""What the numbers are: exact softmax where that is promised, finite and near their float64 everywhere."""

import math
from collections.abc import Iterator

import torch

from efficient_attn.conformance.cases import (
    BORDERS,
    LENGTHS,
    LONG_BORDERS,
    Case,
    Inputs,
    both,
    everywhere,
    joint,
)
from efficient_attn.conformance.compare import close, condition, distance, largest, rounding, rounding_step
from efficient_attn.conformance.records import Finding
from efficient_attn.conformance.reference import exact
from efficient_attn.conformance.subject import Subject, is_called, run
from efficient_attn.conformance.table import CannotCheck, check

HALF = ("bfloat16", "float16")
NARROW = ("float32", *HALF)
# Sums of one per key that no half-precision number can count, and float16 cannot even hold.
LONG_SUM = 70_000


def softmax_bound(inputs: Inputs, wanted: torch.Tensor, *, scale: float, causal: bool, dtype: str) -> float:
    """What an exact backend may be off: 1e-12 in float64, else twice what the plain formula loses."""
    if dtype == "float64":
        return 1e-12 * max(1.0, largest(inputs.v))
    # The scale multiplies queries or scores; the formula says nothing of it, and either rounds its own way.
    scaled = inputs._replace(q=inputs.q * scale), inputs._replace(k=inputs.k * scale), inputs
    plain = [exact(one, scale=s, causal=causal) for one, s in zip(scaled, (1.0, 1.0, scale), strict=True)]
    lost = max(distance(one, wanted) for one in plain)
    return 2 * (lost if math.isfinite(lost) else 0.0) + 2 * rounding_step(wanted.to(inputs.v.dtype))


def _exactness(subject: Subject, case: Case, scale: float | None = None) -> Finding:
    inputs = subject.inputs(case)
    factor = case.head_dim**-0.5 if scale is None else scale
    wanted = exact(inputs.double(), scale=factor, causal=case.causal)
    bound = softmax_bound(inputs, wanted, scale=factor, causal=case.causal, dtype=case.dtype)
    return close("Against the definition", run(subject.build(case, scale=scale), inputs), wanted, bound)


def _shapes(*, dtype: str) -> tuple[Case, ...]:
    ordinary = everywhere(*LENGTHS, 97, dtype=dtype)
    special = (
        Case(tokens=5, heads=4, kv_heads=2, masked=True, dtype=dtype),
        Case(tokens=5, heads=3, kv_heads=1, value_dim=7, dtype=dtype),
        Case(tokens=3, keys=8, head_dim=1, value_dim=1, dtype=dtype),
        Case(tokens=16, head_dim=59, value_dim=64, masked=True, dtype=dtype),
        Case(tokens=3, head_dim=128, batch=1, dtype=dtype),
    )
    return *ordinary, *(one for case in special for one in both(case))


@check(
    "The output is that of softmax attention, to rounding.",
    cases=(
        *(case for dtype in ("float64", *NARROW) for case in _shapes(dtype=dtype)),
        *(one for n in BORDERS for one in both(Case(tokens=n, batch=1, heads=1, kv_heads=1))),
    ),
    drawn=lambda seed: (
        *joint(seed, 5, 40, 200),
        *(case for dtype in NARROW for case in joint(seed, 40, 200, dtype=dtype) if case.batch < 4),
    ),
    long=lambda seed: tuple(
        case.but(batch=1, heads=2, kv_heads=1)
        for dtype in ("float64", "float32", "bfloat16")
        for case in joint(seed, *LONG_BORDERS, dtype=dtype)
    ),
    capability="exact",
)
def equals_softmax_attention(subject: Subject, case: Case) -> Iterator[Finding]:
    yield _exactness(subject, case)


@check(
    "Whatever the scale, the output is that of softmax attention.",
    cases=(one for dtype in ("float64", "float32") for one in both(Case(tokens=7, dtype=dtype))),
    needs=("exact",),
)
def equals_softmax_attention_at_every_scale(subject: Subject, case: Case) -> Iterator[Finding]:
    if is_called(subject.build(case)):
        raise CannotCheck("A function takes no scale.")
    for scale in (0.0, 1e-3, 1.0, 30.0):
        yield _exactness(subject, case, scale)


@check(
    "Scores of any size give the softmax, one-hot rows among them, and nothing that is not finite.",
    cases=(
        one
        for dtype in ("float64", "float32")
        for norm in (10.0, 100.0, 1000.0)
        for one in both(Case(tokens=7, dtype=dtype, norm=norm))
    ),
    needs=("exact",),
)
def extreme_scores_stay_softmax(subject: Subject, case: Case) -> Iterator[Finding]:
    yield _exactness(subject, case)


@check(
    "Adding one vector to all keys changes nothing: the softmax of a row does not see a constant.",
    cases=both(Case(tokens=7)),
    needs=("exact",),
)
def a_shift_of_all_keys_changes_nothing(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    shifted = inputs._replace(k=inputs.k + 3.0)
    yield close("Keys moved by 3", run(backend, shifted), run(backend, inputs), 1e-12 * largest(inputs.v))


@check(
    "Queries c times as long with keys c times as short give the same output.",
    cases=both(Case(tokens=7)),
    needs=("exact",),
)
def length_moves_freely_between_queries_and_keys(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    moved = inputs._replace(q=inputs.q * 8.0, k=inputs.k / 8.0)
    yield close("Queries times 8", run(backend, moved), run(backend, inputs), 1e-12 * largest(inputs.v))


@check(
    "The scale is the factor on q·k, once: inputs c times as long at scale s are inputs at scale c²·s.",
    cases=(*both(Case(tokens=7)), *both(Case(tokens=200, batch=1, value_dim=3))),
    drawn=lambda seed: joint(seed, 9),
)
def scale_is_a_factor_on_the_scores(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, default = subject.inputs(case), case.head_dim**-0.5
    backend = subject.build(case)
    if is_called(backend):
        raise CannotCheck("It declares no scale: a function is called as it is.")
    wanted, bound = run(backend, inputs), rounding(backend, inputs, case.dtype)
    yield close("Default scale given", run(subject.build(case, scale=default), inputs), wanted, bound)
    twice = inputs._replace(q=inputs.q * 2.0, k=inputs.k * 2.0)
    yield close("Twice as long", run(subject.build(case, scale=default / 4), twice), wanted, bound)


@check(
    "In float32, bfloat16 and float16 the output is near that in float64 of the same numbers.",
    cases=(
        *(case for dtype in NARROW for case in everywhere(1, 3, 16, 65, dtype=dtype)),
        *(one.but(batch=1) for dtype in NARROW for one in everywhere(200, 513, dtype=dtype)),
    ),
    drawn=lambda seed: tuple(case for dtype in NARROW for case in joint(seed, 9, dtype=dtype)),
    beyond="narrow dtypes",
)
def narrow_dtypes_lose_only_rounding(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs = subject.inputs(case)
    wide = subject.build(case).double()
    wanted = run(wide, inputs.double())
    bound = rounding(wide, inputs.double(), "float32") + 2 * rounding_step(wanted.to(inputs.v.dtype))
    if case.dtype in HALF:
        # Sums of products that a promise of exactness measures more finely.
        bound = bound + 2 * distance(_plain(inputs, case), _plain(inputs.double(), case))
    yield close("Against float64", run(subject.build(case), inputs), wanted, bound)


@check(
    "Sums over many keys are taken in float32 or better, whatever the dtype.",
    cases=(
        one
        for dtype, keys in (("bfloat16", 3000), ("float16", LONG_SUM))
        for one in both(Case(tokens=1, keys=keys, batch=1, heads=1, kv_heads=1, dtype=dtype, norm=0.0))
    ),
    needs=("cross",),
    beyond="narrow dtypes",
)
def long_sums_do_not_stall_in_half_precision(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs = subject.inputs(case)
    inputs = inputs._replace(v=torch.ones_like(inputs.v))
    wanted = run(subject.build(case, learned=None).double(), inputs.double())
    step = rounding_step(wanted.to(inputs.v.dtype))
    yield close(
        "Against float64, values 1", run(subject.build(case, learned=None), inputs), wanted, 2 * step + 1e-3
    )


@check(
    "Large scores in half precision, and queries opposed to every key, overflow nothing.",
    cases=(
        one
        for dtype in ("float64", *NARROW)
        for norm in (3.0, 300.0)
        for one in both(Case(tokens=7, dtype=dtype, norm=norm))
    ),
)
def large_inputs_stay_finite(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    size = largest(inputs.v) * float(condition(backend, inputs).max())
    for where, one in (("Random", inputs), ("Opposed", inputs._replace(q=-inputs.k))):
        out = run(backend, one)
        # Signed weights may cancel almost altogether: of such a row only finiteness is asked.
        bound = 2 * size if subject.promises.nonnegative and subject.promises.averages else math.inf
        yield Finding(where, largest(out), bound if largest(out) < math.inf else 0.0)


def _plain(inputs: Inputs, case: Case) -> torch.Tensor:
    return exact(inputs, scale=case.head_dim**-0.5, causal=case.causal)
