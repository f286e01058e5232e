"""Key masks, positions and causality: which keys a query reads, at lengths around every usual block size."""

import math
from collections.abc import Iterator
from functools import partial

import torch

from efficient_attn.conformance.cases import (
    BORDERS,
    DTYPES,
    HEAD_SIZES,
    LARGER,
    LONG_BORDERS,
    LONG_KEYS,
    LONG_QUERIES,
    MODEL,
    CheckCase,
    Inputs,
    both,
    everywhere,
    joint,
    vary,
)
from efficient_attn.conformance.records import Finding
from efficient_attn.conformance.subject import (
    LEAK,
    LEAK_LONG,
    LONG,
    Subject,
    close,
    decode,
    gradients,
    largest,
    magnified,
    run,
    same_bits,
)
from efficient_attn.conformance.table import Check

MASK = ("key_mask",)
# Heads as wide as in real models, and a sequence beyond usual blocks.
WIDE = (
    CheckCase(tokens=3, batch=3, heads=4, kv_heads=2, head_dim=64, value_dim=64),
    CheckCase(tokens=130, heads=2, kv_heads=1, head_dim=64, value_dim=5),
    CheckCase(tokens=5, heads=2, kv_heads=2, head_dim=128, value_dim=128),
)
SHORT = tuple(CheckCase(tokens=n) for n in (1, 3, 65))
SINGLE = CheckCase(tokens=1, batch=1, heads=2, kv_heads=1)
# Rows of several blocks, with keys before them.
ROWS = vary(CheckCase(tokens=600, keys=700, batch=1, heads=1, kv_heads=1, causal=True), masked=(False, True))
BEYOND = CheckCase(tokens=3300, batch=1, heads=1, kv_heads=1, causal=True)
# A little more than the largest of BORDERS.
WHOLE = CheckCase(tokens=530, batch=1, heads=2, kv_heads=1, value_dim=3)
MASKED = WHOLE.but(masked=True, pattern=2)
LONGEST = WHOLE.but(tokens=2100)


@Check(
    "Masked keys and values change no bit, even NaN and in `extend`, and have gradients of zero.",
    cases=everywhere(2, 7, 65, dtype=DTYPES, masked=[True]),
    drawn=lambda seed: (
        *(case for case in joint(seed, 9, 200, 513) if case.masked and case.batch < 4),
        *vary(*LONG_KEYS, masked=[True], pattern=[2]),
    ),
    needs=MASK,
)
def padding_contents_change_no_bit(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    expected, spoilt = run(backend, inputs), inputs.padded(math.nan)
    for filling in (100.0, math.nan, math.inf):
        yield same_bits(f"Padding of {filling}", run(backend, inputs.padded(filling)), expected)
    if subject.promises.streaming and case.causal and case.tokens == case.k_tokens < 10:
        for parts in ([case.tokens // 2, case.tokens - case.tokens // 2], [1] * case.tokens):
            streamed = [decode(backend, x, parts)[0] for x in (spoilt, inputs)]
            yield same_bits(f"Padding of nan in parts of {parts}", *streamed)
    if subject.promises.gradients and case.dtype == "float64":
        for name, gradient in gradients(partial(run, backend), spoilt):
            yield _finite(name, gradient)
            if not name.endswith("q") and spoilt.key_mask is not None:
                masked = gradient.transpose(1, 2)[~spoilt.key_mask]
                yield Finding(f"{name} where it is masked", largest(masked), 0.0)


@Check(
    "Any number of masked tokens before or after a sequence, even none, changes its outputs by rounding.",
    cases=(
        *everywhere(1, 7, 65, masked=[False]),
        *both(CheckCase(tokens=200, batch=1)),
        *vary(SINGLE, tokens=(1, 7, *BORDERS, 1023), causal=(False, True)),
        *LONG_KEYS,
    ),
    long=lambda seed: both(LONGEST),
    needs=MASK,
)
def padding_on_either_side_does_not_matter(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, backend, expected, bound = subject.plain_call(case, max_tokens=case.k_tokens + 1100)
    mask = torch.ones(case.batch, case.k_tokens, dtype=torch.bool)
    yield close("A mask of True", run(backend, inputs._replace(key_mask=mask)), expected, bound)
    # In one case whole tiles are masked, which have neither a largest score nor a sum.
    tiles = ((1100, 0), (0, 1100)) if case.tokens == 200 else ()
    sides = ((0, 1), (0, 3), (1, 0), (3, 0), (0, 64), (64, 3)) if case.batch > 1 else ((0, 1),)
    for before, after in (*sides, *tiles):
        if before and subject.promises.needs_max_tokens:
            continue  # its parameters belong to positions
        out = run(backend, _surrounded(inputs, before, after))[:, :, before : before + case.tokens]
        yield close(f"{before} masked tokens before and {after} after", out, expected, bound)


def _surrounded(inputs: Inputs, before: int, after: int) -> Inputs:
    """Inputs with masked NaN keys and values on either side, and queries of ones at these positions."""

    def around(x: torch.Tensor, filling: float) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, 0, before, after), value=filling)

    mask = around(torch.ones(len(inputs.k), inputs.k.shape[2], 1), 0.0)[..., 0].bool()
    return Inputs(around(inputs.q, 1.0), around(inputs.k, math.nan), around(inputs.v, math.nan), mask)


@Check(
    "Fully-masked rows give zero outputs and finite gradients, which are zero for their own inputs.",
    cases=(*vary(*SHORT, *WIDE, dtype=DTYPES, causal=(False, True)), *LONG_KEYS),
    needs=MASK,
)
def fully_masked_rows_give_zeros(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    mask = torch.ones(case.batch, case.k_tokens, dtype=torch.bool)
    mask[0] = False
    # In a causal case the first query of the other sequences is fully masked too.
    mask[1:, 0] = not case.causal
    traced = inputs._replace(key_mask=mask).leaves()
    out = run(backend, traced)
    yield Finding("A sequence of masked keys", largest(out[0]), 0.0)
    if case.causal:
        yield Finding("A first token that is masked", largest(out[1:, :, 0]), 0.0)
    if subject.promises.gradients:
        for name, gradient in zip("qkv", torch.autograd.grad(out.square().sum(), traced[:3]), strict=True):
            yield Finding(f"Gradient of a fully-masked sequence w.r.t. {name}", largest(gradient[0]), 0.0)
            if subject.promises.nonnegative or case.dtype in ("float64", "float32"):
                # A signed denominator close to zero may have a gradient that overflows half precision.
                yield _finite(f"Gradient w.r.t. {name}", gradient)


def _finite(where: str, x: torch.Tensor) -> Finding:
    return Finding(where, 0.0 if x.isfinite().all() else math.nan, 0.0)


@Check(
    "Later tokens change earlier outputs by no more than rounding, and have gradients of exactly zero.",
    cases=(
        *everywhere(2, 7, 70, 130, dtype=("float64", "float32"), causal=[True]),
        *everywhere(3, 65, causal=[True]),
    ),
    long=lambda seed: vary(BEYOND, dtype=("float64", "float32")),
    needs=("causal",),
)
def later_values_move_no_output(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    backend = subject.build(case)
    for where, inputs, leak in _sequences(subject, case):
        expected, bound = run(backend, inputs), magnified(leak[case.dtype], backend, inputs)
        # In a long case tokens change far behind the usual lengths of a block.
        long = case.tokens > 3071
        for cut in [2049, 3071, case.tokens - 1] if long else sorted({1, case.tokens // 2}):
            replacement = subject.inputs(case, variant=1)
            for what, factor in (("others", 1.0), ("long ones", LONG), ("zeros", 0.0)):
                pairs = zip(inputs[:3], replacement[:3], strict=True)
                parts = (torch.cat([x[:, :, :cut], y[:, :, cut:] * factor], dim=2) for x, y in pairs)
                changed = inputs.of(*parts)
                out = run(backend, changed)[:, :, :cut]
                yield close(f"{where}, {what} from token {cut}", out, expected[:, :, :cut], bound[:, :, :cut])
    if not subject.promises.gradients or case.tokens > 100 or case.dtype != "float64":
        return
    flowing = subject.inputs(case, variant=1).v
    for where, inputs, _ in _sequences(subject, case):
        traced = inputs.leaves()
        out = run(backend, traced)
        for row in sorted({0, case.tokens // 3, case.tokens // 2, case.tokens - 2}):
            # One backward pass for all rows up to this one: random weights keep their gradients apart.
            total = (out * flowing)[:, :, : row + 1].sum()
            for name, gradient in zip(
                "qkv", torch.autograd.grad(total, traced[:3], retain_graph=True), strict=True
            ):
                yield Finding(
                    f"{where}, outputs up to {row}, later {name}", largest(gradient[:, :, row + 1 :]), 0.0
                )


def _sequences(subject: Subject, case: CheckCase) -> Iterator[tuple[str, Inputs, dict[str, float]]]:
    """Gaussian inputs; long keys followed by short ones; long queries and keys throughout."""
    inputs, half = subject.inputs(case), case.tokens // 2
    yield "Gaussian", inputs, LEAK
    falling = torch.ones(case.tokens, 1, dtype=inputs.k.dtype)
    falling[:half] = LONG
    yield "Long keys first", inputs._replace(k=inputs.k * falling), LEAK_LONG
    yield "Long tokens", inputs._replace(q=inputs.q * LONG, k=inputs.k * LONG), LEAK_LONG


def _borders(case: CheckCase) -> tuple[int, ...]:
    return tuple(n for n in (*BORDERS, *LONG_BORDERS) if n < case.k_tokens)


@Check(
    "The first outputs of a causal sequence equal the outputs of the shorter sequence, at any length.",
    cases=vary(WHOLE, MASKED, causal=[True]),
    long=lambda seed: (LONGEST.but(causal=True),),
    needs=("causal",),
)
def a_prefix_is_a_sequence_of_its_own(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, backend, expected, bound = subject.plain_call(case)
    for tokens in _borders(case):
        out = run(backend, inputs.part(slice(tokens)))
        yield close(f"The first {tokens} tokens", out, expected[:, :, :tokens], bound[:, :, :tokens])


@Check(
    "Queries alone give their rows: any single one, and the last ones, which have the last positions.",
    cases=(*both(WHOLE, MASKED), *everywhere(2, 7, 65, causal=[True]), *ROWS),
    drawn=lambda seed: (*joint(seed, 5, 40), *LARGER),
    # More queries than an index of 16 bits.
    long=lambda seed: (*both(LONGEST), LONG_QUERIES.but(tokens=32_777)),
    unless=("needs_all_queries",),
)
def a_query_alone_is_its_row(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    if not (case.causal or subject.promises.cross):
        return
    inputs, backend, expected, bound = subject.plain_call(case)
    before, rows = case.k_tokens - case.tokens, [n for n in _borders(case) if n < case.tokens]
    for row in sorted({0, case.tokens - 1, *rows}):
        here = slice(row, row + 1)
        alone = inputs._replace(q=inputs.q[:, :, here])
        if case.causal:
            alone = alone.part(slice(before + row + 1))
        yield close(f"Query {row} alone", run(backend, alone), expected[:, :, here], bound[:, :, here])
    for last in sorted({1, case.tokens // 2, *rows}) if case.causal else ():
        out = run(backend, inputs._replace(q=inputs.q[:, :, -last:]))
        yield close(f"The last {last} queries alone", out, expected[:, :, -last:], bound[:, :, -last:])


@Check(
    "Masked keys leave no gap: outputs equal the outputs for the real tokens alone.",
    cases=(*both(MASKED.but(batch=2)), CheckCase(tokens=3, keys=40, masked=True, pattern=1)),
    drawn=lambda seed: (
        *(case.but(keys=None) if case.causal else case for case in joint(seed, 9, 70, 200) if case.masked),
        *(case.but(masked=True, pattern=2) for case in LONG_KEYS if not case.causal),
        *vary(MODEL.but(batch=2, heads=2, kv_heads=1), head_dim=HEAD_SIZES, causal=(False, True)),
    ),
    long=lambda seed: both(LONGEST.but(masked=True, pattern=2)),
    needs=("key_mask", "cross"),
    unless=("needs_max_tokens",),
)
def masked_keys_leave_no_gap(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, backend, out, bound = subject.plain_call(case)
    assert inputs.key_mask is not None
    for b, real in enumerate(inputs.key_mask):
        q, k, v = (x[b : b + 1] for x in inputs[:3])
        # Causal queries move with the keys, so that only real tokens have a position.
        queries = real if case.causal else slice(None)
        alone = run(backend, Inputs(q[:, :, queries], k[:, :, real], v[:, :, real], None))
        got, most = out[b : b + 1, :, queries], bound[b : b + 1, :, queries]
        yield close(f"The real tokens of sequence {b}", got, alone, most)
