"""Positions: no leakage from later tokens, and lengths around every usual block size."""

from collections.abc import Iterator

import torch

from efficient_attn.conformance.cases import (
    BORDERS,
    LONG_BORDERS,
    LONG_KEYS,
    Case,
    Inputs,
    both,
    causally,
    joint,
)
from efficient_attn.conformance.compare import LEAK, LEAK_LONG, LONG, close, largest, magnified, rounding
from efficient_attn.conformance.records import Finding
from efficient_attn.conformance.subject import Subject, run
from efficient_attn.conformance.table import Check

CAUSAL = ("causal",)
# Rows of several blocks, with keys before them.
_ROWS = Case(tokens=600, keys=700, batch=1, heads=1, kv_heads=1, causal=True)
ROWS = (_ROWS, _ROWS.but(masked=True))
# Longer than in other checks of outputs.
BEYOND = Case(tokens=3300, batch=1, heads=1, kv_heads=1, causal=True)


@Check(
    "The gradient of an output with respect to any later token is exactly zero.",
    cases=(*causally(2, 3, 7, 65), Case(tokens=16, causal=True, norm=LONG)),
    needs=("causal", "gradients"),
)
def no_output_depends_on_a_later_token(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs = subject.inputs(case)
    leaves = [x.requires_grad_() for x in inputs[:3]]
    out = run(subject.build(case), inputs)
    flowing = subject.inputs(case, variant=1).v
    for row in sorted({0, case.tokens // 3, case.tokens // 2, case.tokens - 2}):
        # One backward pass for all rows up to this one: random weights keep their gradients from cancelling.
        total = (out * flowing)[:, :, : row + 1].sum()
        gradients = torch.autograd.grad(total, leaves, retain_graph=True)
        for name, gradient in zip("qkv", gradients, strict=True):
            yield Finding(f"Outputs up to {row}, later {name}", largest(gradient[:, :, row + 1 :]), 0.0)


@Check(
    "Later tokens change earlier outputs by no more than rounding, for any finite values.",
    cases=(case for dtype in ("float64", "float32") for case in causally(2, 7, 70, 130, dtype=dtype)),
    long=lambda seed: tuple(BEYOND.but(dtype=dtype) for dtype in ("float64", "float32")),
    needs=CAUSAL,
)
def later_values_move_no_output(subject: Subject, case: Case) -> Iterator[Finding]:
    backend = subject.build(case)
    for where, inputs, leak in _sequences(subject, case):
        expected, bound = run(backend, inputs), magnified(leak[case.dtype], backend, inputs)
        # In a long case tokens change far behind the usual lengths of a block.
        long = case.tokens > 3071
        for cut in [2049, 3071, case.tokens - 1] if long else sorted({1, case.tokens // 2}):
            for what, changed in _changed_after(inputs, cut, subject.inputs(case, variant=1)):
                out = run(backend, changed)[:, :, :cut]
                yield close(f"{where}, {what} from token {cut}", out, expected[:, :, :cut], bound[:, :, :cut])


def _sequences(subject: Subject, case: Case) -> Iterator[tuple[str, Inputs, dict[str, float]]]:
    """Gaussian inputs; long keys followed by short ones; long queries and keys throughout."""
    inputs, half = subject.inputs(case), case.tokens // 2
    yield "Gaussian", inputs, LEAK
    falling = torch.ones(case.tokens, 1, dtype=inputs.k.dtype)
    falling[:half] = LONG
    yield "Long keys first", inputs._replace(k=inputs.k * falling), LEAK_LONG
    yield "Long tokens", inputs._replace(q=inputs.q * LONG, k=inputs.k * LONG), LEAK_LONG


def _changed_after(inputs: Inputs, cut: int, replacement: Inputs) -> Iterator[tuple[str, Inputs]]:
    """Inputs with other tokens from `cut` on: of ordinary norm, 20 times as long, or zero."""
    for what, factor in (("others", 1.0), ("long ones", LONG), ("zeros", 0.0)):
        q, k, v = (x.detach().clone() for x in inputs[:3])
        q[:, :, cut:] = replacement.q[:, :, cut:] * factor
        k[:, :, cut:] = replacement.k[:, :, cut:] * factor
        v[:, :, cut:] = replacement.v[:, :, cut:] * factor
        yield what, Inputs(q, k, v, inputs.key_mask)


@Check(
    "With fewer queries than keys, the queries are the last positions of the keys.",
    cases=(*causally(2, 7, 65), *ROWS),
    needs=CAUSAL,
)
def queries_are_the_last_positions(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    bound = rounding(backend, inputs, case.dtype)
    for last in sorted({1, case.tokens // 2, *(n for n in BORDERS if 128 < n < case.tokens)}):
        out = run(backend, inputs._replace(q=inputs.q[:, :, -last:]))
        expected = run(backend, inputs)[:, :, -last:]
        yield close(f"The last {last} queries alone", out, expected, bound[:, :, -last:])


# A little more than the largest of BORDERS.
WHOLE = Case(tokens=530, batch=1, heads=2, kv_heads=1, value_dim=3)
MASKED = WHOLE.but(masked=True, pattern=2)
LONGEST = WHOLE.but(tokens=2100)


def _borders(case: Case) -> tuple[int, ...]:
    return tuple(n for n in (*BORDERS, *LONG_BORDERS) if n < case.k_tokens)


@Check(
    "The first outputs of a causal sequence equal the outputs of the shorter sequence, at any length.",
    cases=(WHOLE.but(causal=True), MASKED.but(causal=True)),
    long=lambda seed: (LONGEST.but(causal=True),),
    needs=("causal",),
)
def a_prefix_is_a_sequence_of_its_own(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    expected, bound = run(backend, inputs), rounding(backend, inputs, case.dtype)
    for tokens in _borders(case):
        out = run(backend, inputs.part(slice(tokens)))
        yield close(f"The first {tokens} tokens", out, expected[:, :, :tokens], bound[:, :, :tokens])


@Check(
    "A single query gives its row, with all keys or, if causal, with the keys up to its own position.",
    cases=(*both(WHOLE), *both(MASKED)),
    drawn=lambda seed: (*joint(seed, 5, 40), *LONG_KEYS),
    long=lambda seed: both(LONGEST),
)
def a_query_alone_is_its_row(subject: Subject, case: Case) -> Iterator[Finding]:
    if not (case.causal or subject.promises.cross):
        return
    inputs, backend = subject.inputs(case), subject.build(case)
    expected, bound = run(backend, inputs), rounding(backend, inputs, case.dtype)
    before = case.k_tokens - case.tokens
    for row in sorted({0, case.tokens - 1, *(n for n in _borders(case) if n < case.tokens)}):
        alone = inputs._replace(q=inputs.q[:, :, row : row + 1])
        if case.causal:
            alone = alone.part(slice(before + row + 1))
        here = slice(row, row + 1)
        yield close(f"Query {row} alone", run(backend, alone), expected[:, :, here], bound[:, :, here])


@Check(
    "Masked keys leave no gap: outputs equal the outputs for the real tokens alone.",
    cases=(*both(MASKED.but(batch=2)), Case(tokens=3, keys=40, masked=True, pattern=1)),
    drawn=lambda seed: (
        *(case.but(keys=None) if case.causal else case for case in joint(seed, 9, 70, 200) if case.masked),
        *(case.but(masked=True, pattern=2) for case in LONG_KEYS if not case.causal),
    ),
    long=lambda seed: both(LONGEST.but(masked=True, pattern=2)),
    needs=("key_mask", "cross"),
    unless=("needs_max_tokens",),
)
def masked_keys_leave_no_gap(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    assert inputs.key_mask is not None
    out, bound = run(backend, inputs), rounding(backend, inputs, case.dtype)
    for b, real in enumerate(inputs.key_mask):
        q, k, v = (x[b : b + 1] for x in inputs[:3])
        # Causal queries move with the keys, so that only real tokens have a position.
        queries = real if case.causal else slice(None)
        alone = run(backend, Inputs(q[:, :, queries], k[:, :, real], v[:, :, real], None))
        got, most = out[b : b + 1, :, queries], bound[b : b + 1, :, queries]
        yield close(f"The real tokens of sequence {b}", got, alone, most)


@Check(
    "A mask without masked keys changes the output by no more than rounding.",
    cases=(
        *(case for n in (1, 7, *BORDERS) for case in both(Case(tokens=n, batch=1, heads=2, kv_heads=1))),
        *LONG_KEYS,
    ),
    long=lambda seed: both(LONGEST),
    needs=("key_mask",),
)
def a_mask_of_real_keys_changes_nothing(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    masked = inputs._replace(key_mask=torch.ones(case.batch, case.k_tokens, dtype=torch.bool))
    bound = rounding(backend, inputs, case.dtype)
    yield close("A mask of True", run(backend, masked), run(backend, inputs), bound)
