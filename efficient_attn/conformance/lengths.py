"""Lengths around every usual block size: short and long sequences behave alike."""

from collections.abc import Iterator

import torch

from efficient_attn.conformance.cases import BORDERS, LONG_BORDERS, LONG_KEYS, Case, Inputs, both, joint
from efficient_attn.conformance.compare import close, rounding
from efficient_attn.conformance.records import Finding
from efficient_attn.conformance.subject import Subject, run
from efficient_attn.conformance.table import check

# A little more than the largest of BORDERS.
WHOLE = Case(tokens=530, batch=1, heads=2, kv_heads=1, value_dim=3)
MASKED = WHOLE.but(masked=True, pattern=2)
LONGEST = WHOLE.but(tokens=2100)


def _borders(case: Case) -> tuple[int, ...]:
    return tuple(n for n in (*BORDERS, *LONG_BORDERS) if n < case.k_tokens)


@check(
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


@check(
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


@check(
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


@check(
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
