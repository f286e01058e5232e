"""Implied attention weights: their sign, their row sums, and the values that they are applied to."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from efficient_attn.conformance.cases import BORDERS, LONG_KEYS, LONG_QUERIES, Case, both, everywhere
from efficient_attn.conformance.compare import close, condition, exact, largest, rounding
from efficient_attn.conformance.records import Finding
from efficient_attn.conformance.subject import Subject, run
from efficient_attn.conformance.table import CannotCheck, Check

# Several perturbations of the parameters, so that no property holds by chance.
LEARNED = (0, 1, 2)
# Distance of queries and keys from zero at which many kernels are tiny.
FAR = 20.0
# One sequence and one head at every block border.
SINGLE = tuple(variant for n in BORDERS for variant in both(Case(tokens=n, batch=1, heads=1, kv_heads=1)))
SEVERAL = (*everywhere(1, 2, 7, 16), *(c.but(norm=3.0) for c in everywhere(16)))


@Check("The implied weights are nonnegative.", cases=SEVERAL, capability="nonnegative")
def weights_are_never_negative(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs = subject.inputs(case)
    for learned in LEARNED:
        weights = subject.build(case, learned=learned).attention_weights(
            inputs.q, inputs.k, key_mask=inputs.key_mask
        )
        yield Finding("Most negative weight", largest(weights.clamp(max=0.0)), 0.0)


@Check("The implied weights of a row sum to one.", cases=SEVERAL, capability="averages")
def weights_of_a_row_sum_to_one(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs = subject.inputs(case)
    ones = inputs._replace(v=torch.ones_like(inputs.v))
    far = tuple(ones._replace(q=ones.q + shift, k=ones.k - FAR) for shift in (-FAR, FAR))
    for learned, arranged in itertools.product(LEARNED, (ones, *far)):
        backend = subject.build(case, learned=learned)
        out = run(backend, arranged)
        # Fully-masked rows are zero, as `blind_queries_give_zeros` checks.
        expected = reads(subject, case, inputs.key_mask, out)[..., None].double().expand_as(out)
        yield close("Row sums", out, expected, 1e-12 * condition(backend, arranged) * case.k_tokens)


@Check("The output is linear in the values.", cases=everywhere(1, 2, 7))
def outputs_are_linear_in_the_values(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    second = subject.inputs(case, variant=1).v
    mixed = run(backend, inputs._replace(v=3.0 * inputs.v - 2.0 * second))
    expected = 3.0 * run(backend, inputs) - 2.0 * run(backend, inputs._replace(v=second))
    bound = 5 * rounding(backend, inputs, case.dtype) * max(1.0, largest(second))
    yield close("Of 3·v − 2·v′", mixed, expected, bound)


@Check(
    "Permuted queries give permuted outputs.",
    cases=tuple(case for case in (*everywhere(2, 7), *SINGLE, LONG_QUERIES) if not case.causal),
    long=lambda seed: (LONG_QUERIES.but(tokens=32_777),),
    needs=("cross",),
)
def order_of_queries_is_order_of_outputs(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    out = run(backend, inputs._replace(q=inputs.q.flip(2)))
    bound = rounding(backend, inputs, case.dtype).flip(2)
    yield close("Reversed queries", out, run(backend, inputs).flip(2), bound)


@Check(
    "Permuting keys, values and mask together does not change the output.",
    # Four keys of four entries are square, and may be turned.
    cases=(*everywhere(2, 4, 7), *SINGLE, *LONG_KEYS),
    long=lambda seed: (
        *both(Case(tokens=2100, batch=1, heads=1, kv_heads=1)),
        # More keys than a fixed block of 4096, and than an index of 16 bits.
        *(Case(tokens=3, keys=keys, batch=1, heads=1, kv_heads=1) for keys in (4097, 32_777)),
    ),
    needs=("cross",),
    unless=("needs_max_tokens",),
)
def order_of_keys_does_not_matter(subject: Subject, case: Case) -> Iterator[Finding]:
    if case.k_tokens > 5000 and not subject.promises.nonnegative:
        return  # the bound of signed weights takes memory for all pairs of keys
    inputs, backend = subject.inputs(case), subject.build(case)
    if case.causal:
        # Only the last query sees every key.
        inputs = inputs._replace(q=inputs.q[:, :, -1:])
    # Equal keys have values of their own.
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
def a_window_reads_its_neighbourhood(subject: Subject, case: Case) -> Iterator[Finding]:
    if subject.spec.size_option != "window":
        raise CannotCheck("The size option is not a window.")
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
        for heads in (4, 1, 2, 3, 5, 6, 7, 8)
        for kv in range(1, heads + 1)
        if heads % kv == 0
        for variant in both(Case(tokens=tokens, heads=heads, kv_heads=kv, value_dim=3))
    ),
    beyond="grouped queries",
)
def grouped_queries_are_repeated_heads(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    group = case.heads // case.kv_heads
    k, v = (x.repeat_interleave(group, dim=1) for x in (inputs.k, inputs.v))
    expected = run(backend, inputs._replace(k=k, v=v))
    yield close(
        "Against repeated heads", run(backend, inputs), expected, rounding(backend, inputs, case.dtype)
    )


def reads(subject: Subject, case: Case, key_mask: Tensor | None, out: Tensor) -> Tensor:
    """Queries that read at least one key, bool [batch heads q_tokens].

    A self-attention backend may be local: with a mask, a row of zeros is taken as a query that reads no key.
    """
    if key_mask is None:
        seen = torch.ones(case.batch, 1, case.tokens, dtype=torch.bool)
    elif case.causal:
        seen = (key_mask.cumsum(dim=1) > 0)[:, None, case.k_tokens - case.tokens :]
    else:
        seen = key_mask.any(dim=1)[:, None, None]
    seen = seen.expand(out.shape[:3])
    local = key_mask is not None and not subject.promises.cross
    return seen & (out != 0).any(dim=-1) if local else seen
