"""Implied attention weights, and the random features and sizes behind them."""

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from efficient_attn.conformance.cases import BORDERS, LONG_KEYS, CheckCase, both, everywhere, vary
from efficient_attn.conformance.numerics import STANDARD_ERRORS
from efficient_attn.conformance.records import Finding
from efficient_attn.conformance.subject import (
    Subject,
    close,
    condition,
    exact,
    largest,
    rounding,
    run,
    same_bits,
)
from efficient_attn.conformance.table import Check, cannot_check

# Several perturbations of the parameters, so that no property holds by chance.
LEARNED = (0, 1, 2)
# Distance of queries and keys from zero at which many kernels are tiny.
FAR = 20.0
# One sequence and one head at every block border.
SINGLE = vary(CheckCase(tokens=1, batch=1, heads=1, kv_heads=1), tokens=BORDERS, causal=(False, True))
SEVERAL = (*everywhere(1, 2, 7, 16), *everywhere(16, norm=[3.0]))


@Check("The implied weights are nonnegative.", cases=SEVERAL, capability="nonnegative")
def weights_are_never_negative(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs = subject.inputs(case)
    for learned in LEARNED:
        weights = subject.build(case, learned=learned).attention_weights(
            inputs.q, inputs.k, key_mask=inputs.key_mask
        )
        yield Finding("Most negative weight", largest(weights.clamp(max=0.0)), 0.0)


@Check("The implied weights of a row sum to one.", cases=SEVERAL, capability="averages")
def weights_of_a_row_sum_to_one(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs = subject.inputs(case)
    ones = inputs._replace(v=torch.ones_like(inputs.v))
    far = tuple(ones._replace(q=ones.q + shift, k=ones.k - FAR) for shift in (-FAR, FAR))
    for learned, arranged in itertools.product(LEARNED, (ones, *far)):
        backend = subject.build(case, learned=learned)
        out = run(backend, arranged)
        # Fully-masked rows are zero, as `fully_masked_rows_give_zeros` checks.
        expected = exact(ones, scale=1.0, causal=case.causal)
        if case.masked and not subject.promises.cross:
            # Masked self-attention may be local: a row of zeros reads no key.
            expected = expected.where((out != 0).any(dim=-1, keepdim=True), 0.0)
        yield close("Row sums", out, expected, 1e-12 * condition(backend, arranged) * case.k_tokens)


@Check("The output is linear in the values.", cases=everywhere(1, 2, 7))
def outputs_are_linear_in_the_values(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, backend, out, bound = subject.plain_call(case)
    second = subject.inputs(case, variant=1).v
    mixed = run(backend, inputs._replace(v=3.0 * inputs.v - 2.0 * second))
    expected = 3.0 * out - 2.0 * run(backend, inputs._replace(v=second))
    yield close("Of 3·v − 2·v′", mixed, expected, 5 * bound * max(1.0, largest(second)))


@Check(
    "Permuting keys, values and mask together does not change the output.",
    # Four keys of four entries are square, and may be turned.
    cases=(*everywhere(2, 4, 7), *SINGLE, *LONG_KEYS),
    long=lambda seed: (
        *both(CheckCase(tokens=2100, batch=1, heads=1, kv_heads=1)),
        # More keys than a fixed block of 4096, and than an index of 16 bits.
        *vary(CheckCase(tokens=3, batch=1, heads=1, kv_heads=1), keys=(4097, 32_777)),
    ),
    needs=("cross",),
    unless=("needs_max_tokens",),
)
def order_of_keys_does_not_matter(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    if case.k_tokens > 5000 and not subject.promises.nonnegative:
        return  # the bound of signed weights takes memory for all pairs of keys
    inputs, backend = subject.inputs(case), subject.build(case)
    if case.causal:
        # Only the last query sees every key.
        inputs = inputs._replace(q=inputs.q[:, :, -1:])
    # Equal keys have different values.
    equal = torch.cat([inputs.k[:, :, :1], inputs.k[:, :, :1], inputs.k[:, :, 2:]], dim=2)
    for where, k in (("Reversed keys", inputs.k), ("Reversed keys, two of them equal", equal)):
        arranged = inputs._replace(k=k)
        mask = None if inputs.key_mask is None else inputs.key_mask.flip(1)
        out = run(backend, arranged._replace(k=k.flip(2), v=inputs.v.flip(2), key_mask=mask))
        yield close(where, out, run(backend, arranged), rounding(backend, arranged, case.dtype))


@Check(
    "A window of r keys is softmax over the keys i−⌊r/2⌋ … i+⌊r/2⌋, or the last r, and any global tokens.",
    cases=everywhere(1, 3, 7, 65),
)
def a_window_reads_its_neighbourhood(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    if subject.spec.size_option != "window":
        raise cannot_check("The size option is not a window.")
    inputs = subject.inputs(case)
    for window in (1, 3, 2 * case.tokens - 1):
        backend = subject.build(case, size=window)
        first = getattr(backend.options, "global_tokens", 0)
        expected = exact(inputs, scale=case.head_dim**-0.5, causal=case.causal, window=window, first=first)
        out = run(backend, inputs)
        yield close(f"window={window}", out, expected, 1e-12 * largest(inputs.v))


@Check(
    "Grouped queries share key and value heads: equal groups of neighbouring query heads.",
    cases=tuple(
        variant
        for tokens in (5, 1)
        for heads in (4, 2, 3, 7, 8, 12, 16, 32)
        for kv in range(1, heads + 1)
        if heads % kv == 0
        for variant in both(CheckCase(tokens=tokens, heads=heads, kv_heads=kv, value_dim=3))
    ),
)
def grouped_queries_are_repeated_heads(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    if not subject.grouped:
        raise cannot_check("Not declared: grouped queries.")
    inputs, backend, out, bound = subject.plain_call(case)
    group = case.heads // case.kv_heads
    k, v = (x.repeat_interleave(group, dim=1) for x in (inputs.k, inputs.v))
    yield close("Against repeated heads", out, run(backend, inputs._replace(k=k, v=v)), bound)


DRAWS = 150
FEW, MANY = 64, 4096
LITTLE = CheckCase(tokens=7)
# Mean square of the rounding of outputs.
ROUNDING = 1e-24
# Equal to 1 modulo every usual power of two.
LARGE_SEED = 2**31 + 1
# One query and two keys along the diagonal, where the sign convention of a QR decomposition shows most.
DIAGONAL = CheckCase(tokens=1, keys=2, batch=1, heads=1, kv_heads=1, head_dim=16)


def _needs_redraw(subject: Subject, case: CheckCase) -> None:
    if not hasattr(subject.build(case).core, "redraw"):
        raise cannot_check("The backend has no random features.")


@Check(
    "The seed determines the random features: equal seeds give equal bits, different seeds do not.",
    # Enough tokens for a random choice among blocks of them.
    cases=both(CheckCase(tokens=66, dtype="float32")),
)
def a_seed_fixes_the_draw(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs = subject.inputs(case)
    yield same_bits("Built twice", run(subject.build(case), inputs), run(subject.build(case), inputs))
    if not subject.has_option("seed"):
        return
    zero, of_seed_1 = (run(subject.build(case, seed=seed), inputs) for seed in (0, 1))
    yield same_bits("seed=1 twice", run(subject.build(case, seed=1), inputs), of_seed_1)
    yield Finding("seed=0 and seed=1 give the same", float(torch.equal(zero, of_seed_1)), 0.0)
    large = run(subject.build(case, seed=LARGE_SEED), inputs)
    yield Finding(f"seed={LARGE_SEED} and seed=1 give the same", float(torch.equal(large, of_seed_1)), 0.0)
    redrawn = subject.build(case, seed=0)
    if hasattr(redrawn.core, "redraw"):
        redrawn.redraw(1)
        yield same_bits("Redrawn with seed 1", run(redrawn, inputs), of_seed_1)
        if subject.promises.streaming and case.causal:
            streamed, anew = (x.extend(*inputs[:3])[0] for x in (redrawn, subject.build(case, seed=1)))
            yield same_bits("Extended after a redraw with seed 1", streamed, anew)


@Check(
    "The random features are isotropic: mirrored queries and keys give the same mean output.",
    cases=(DIAGONAL,),
    needs=("cross",),
)
def the_draw_has_no_preferred_direction(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    _needs_redraw(subject, case)
    along = torch.full((1, 1, 1, case.head_dim), case.head_dim**-0.5, dtype=torch.float64)
    values = torch.tensor([1.0, 0.0], dtype=torch.float64)[None, None, :, None]
    # The scale is 1, so that |q + k| is 2 for one key and 1 for the other.
    backend = subject.build(case, size=case.head_dim, scale=1.0)
    keys = torch.cat([along, 0 * along], dim=2)
    if hasattr(backend.core, "calibrate"):
        # Calibration inputs with a nonzero mean would distinguish a vector from its mirror image.
        typical = torch.cat([along, -along], dim=2)
        backend.calibrate(typical, typical)
    gaps = []
    for seed in range(DRAWS):
        backend.redraw(1 + seed)
        gaps.append(float(backend(along, keys, values) - backend(-along, -keys, values)))
    gap = torch.tensor(gaps, dtype=torch.float64)
    error = float(gap.std()) / math.sqrt(DRAWS)
    yield Finding(
        f"Mean over {DRAWS} draws along the diagonal", abs(float(gap.mean())), STANDARD_ERRORS * error
    )


@Check(
    "The output converges to softmax attention with the number of features: its error falls as 1/√size.",
    cases=both(LITTLE.but(head_dim=8, value_dim=8, norm=0.7)),
    needs=("converges",),
)
def more_features_come_nearer_to_softmax(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    _needs_redraw(subject, case)
    if subject.spec.size_option is None:
        raise cannot_check("The backend has no size option.")
    inputs = subject.inputs(case)
    expected = exact(inputs, scale=case.head_dim**-0.5, causal=case.causal)
    few, many = (_mean_square(subject, case, size, expected) for size in (FEW, MANY))
    # The squared error of an unbiased kernel falls as 1/size; ten times the limit leaves room for chance, and
    # the remainder is rounding.
    yield Finding(f"Mean square with {MANY} features", many, 10 * few * FEW / MANY + ROUNDING)


def _mean_square(subject: Subject, case: CheckCase, size: int, expected: Tensor) -> float:
    """Median over draws, which is robust to a single small denominator."""
    inputs, backend = subject.inputs(case), subject.build(case, size=size)
    squares = []
    for seed in range(15):
        backend.redraw(1 + seed)
        squares.append((run(backend, inputs) - expected).square().mean())
    return float(torch.stack(squares).median())


# More tokens than the window of a backend in which another size is varied.
@Check("The size option matters: another size gives another output.", cases=(CheckCase(tokens=160),))
def the_size_matters(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    if subject.spec.size_option is None:
        raise cannot_check("The backend has no size option.")
    inputs = subject.inputs(case)
    sizes = (1, 9) if subject.spec.size_option == "window" else (2, 8)
    small, large = (run(subject.build(case, size=size, learned=None), inputs) for size in sizes)
    yield Finding("Two sizes give the same", float(torch.equal(small, large)), 0.0)
