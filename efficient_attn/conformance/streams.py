"""Incremental decoding at all shapes: chunks of any size, reused buffers, states with several successors."""

import itertools
import random
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from efficient_attn.backend import Backend
from efficient_attn.conformance.cases import (
    BORDERS,
    LONG_BORDERS,
    MODEL,
    CheckCase,
    Inputs,
    everywhere,
    joint,
    vary,
)
from efficient_attn.conformance.records import Finding
from efficient_attn.conformance.subject import (
    Subject,
    agree,
    close,
    condition,
    decode,
    extend,
    gradients,
    rounding,
    run,
    same_bits,
)
from efficient_attn.conformance.table import Check
from efficient_attn.measure import memory

# A little more than the largest of BORDERS.
DECODED = CheckCase(tokens=530, batch=1, heads=2, kv_heads=1, value_dim=3, causal=True)
LONGEST = DECODED.but(tokens=2100, masked=True, pattern=2)
# More tokens than the usual capacity of a preallocated cache, in parts of at most PREFILL.
MANY = CheckCase(tokens=4200, batch=1, heads=1, kv_heads=1, causal=True)
PREFILL = 1050
# A state of more tokens than a tile holds.
CHAIN = CheckCase(tokens=1030, batch=1, heads=1, kv_heads=1, value_dim=3, causal=True)
BATCH = CheckCase(tokens=5, batch=40, causal=True)
# Tokens around every border are decoded one at a time.
AROUND = 3


def _drawn(seed: int, *lengths: int, dtype: str = "float64") -> tuple[CheckCase, ...]:
    """Causal cases with as many queries as keys, as increremental decoding requires."""
    return tuple(case.but(keys=None) for case in joint(seed, *lengths, dtype=dtype) if case.causal)


@Check(
    "Decoding in parts of any size, even empty, from reused buffers gives the output of the full pass.",
    cases=(
        *everywhere(9, dtype=("float64", "float32", "bfloat16"), causal=[True]),
        *everywhere(1, 2, 3, 70, causal=[True]),
        BATCH,
    ),
    drawn=lambda seed: (
        *_drawn(seed, 2, 9, 70, 200),
        *(case for dtype in ("float32", "bfloat16", "float16") for case in _drawn(seed, 70, dtype=dtype)),
        *(case for dtype in ("bfloat16", "float16") for case in _drawn(seed, 230, dtype=dtype)[:3]),
        *vary(*_drawn(seed, 3, 9), value_dim=[0]),
        MODEL.but(causal=True, dtype="float32"),
    ),
    needs=("streaming",),
)
def parts_of_any_size_are_the_whole(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    tokens = case.tokens
    # Narrow dtypes take the same steps.
    split_anywhere = tokens < 10 and case.dtype == "float64"
    splits = [[split, tokens - split] for split in range(tokens + 1)] if split_anywhere else []
    singles = [[1] * tokens] if tokens < 10 or case in everywhere(70, causal=[True]) else []
    # Single tokens, one large chunk, the rest, and two empty chunks in random order.
    draws = random.Random(f"{subject.seed} {case}")
    ones = min(tokens, draws.randint(1, 3))
    large = draws.randint(0, tokens - ones)
    drawn = [*[1] * ones, large, tokens - ones - large, 0, 0]
    draws.shuffle(drawn)
    yield from _streamed(subject, case, *splits, *singles, drawn)


@Check(
    "Decoding one token at a time is exact on either side of every block border, however long the state.",
    cases=(DECODED, DECODED.but(masked=True, pattern=2), DECODED.but(dtype="float32")),
    long=lambda seed: (LONGEST,),
    needs=("streaming",),
)
def long_states_are_whole(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    steps, done = [], 0
    for border in (*BORDERS, *LONG_BORDERS):
        if done < border - AROUND and border + AROUND < case.tokens:
            steps += [border - AROUND - done, *[1] * 2 * AROUND]
            done = border + AROUND
    yield from _streamed(subject, case, [*steps, case.tokens - done])
    if case.tokens >= LONGEST.tokens:
        # A token that is decoded alone cannot read later ones: each row of the full pass is compared.
        yield from _streamed(subject, case, [1] * case.tokens)


def _streamed(subject: Subject, case: CheckCase, *splits: list[int]) -> Iterator[Finding]:
    """Compare each chunk of each split with the full pass, when returned and after the last call."""
    inputs, backend = subject.inputs(case), subject.rescaled(case)
    expected, bound = run(backend, inputs), rounding(backend, inputs, case.dtype)
    for parts in splits:
        yield from _in_parts(backend, inputs, parts, expected, bound)


def _in_parts(
    backend: Backend, inputs: Inputs, parts: list[int], expected: Tensor, bound: Tensor
) -> Iterator[Finding]:
    """Compare each chunk with the full pass.

    Buffers are reused, masks without masked keys are left out in turn, and after each part a second sequence
    of NaN continues from the state before it.
    """
    buffers = inputs.each(lambda x: torch.zeros_like(x.narrow(-1 if x.ndim == 2 else 2, 0, max(parts))))
    state, start, outputs = None, 0, list[tuple[str, Tensor, Tensor]]()
    with torch.no_grad():
        for number, tokens in enumerate(parts):
            here, before = slice(start, start + tokens), state
            new = buffers.part(slice(0, tokens))
            new.fill(inputs.part(here))
            mask = new.key_mask
            if mask is not None and number % 2 == len(parts) % 2 and bool(mask.all()):
                mask = None
            out, state = backend.extend(*new[:3], before, key_mask=mask)
            where = f"Tokens {start} to {start + tokens} in parts of {', '.join(map(str, parts))}"
            yield close(where, out, expected[:, :, here], bound[:, :, here])
            dtype = f"{where}: {out.dtype} instead of {expected.dtype}"
            yield Finding(dtype, float(out.dtype != expected.dtype), 0.0)
            outputs.append((where, out, out.clone()))
            start += tokens
            for buffer in buffers[:3]:
                buffer.fill_(torch.nan)
            if new.key_mask is not None:
                new.key_mask.logical_not_()
            if before is not None:
                backend.extend(*new[:3], before)
    for where, out, copied in outputs:
        yield same_bits(f"{where}, at the end", out, copied)


@Check(
    "A state of thousands of tokens loses none, and half precision does not stall its sums.",
    cases=(MANY, MANY.but(tokens=1400, dtype="bfloat16", norm=0.0)),
    long=lambda seed: (MANY.but(tokens=8300),),
    needs=("streaming",),
)
def very_long_states_are_whole(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    # The last tokens outweigh the others, so that they show if they are lost.
    steps = 400 if case.dtype == "bfloat16" else 2
    inputs.v[:, :, -steps:] += 8.0

    def at_end(inputs: Inputs, rows: int) -> list[torch.Tensor]:
        if not subject.promises.needs_all_queries:
            inputs = inputs._replace(q=inputs.q[:, :, -rows:])
        return [x[:, :, -rows:] for x in (run(backend, inputs), rounding(backend, inputs, case.dtype))]

    parts = [len(part) for part in torch.arange(case.tokens - steps).split(PREFILL)]
    with torch.no_grad():
        out, _ = decode(backend, inputs, parts + [1] * steps)
        for end in itertools.accumulate(parts):
            row, limit = at_end(inputs.part(slice(end)), 1)
            yield close(f"The last token of {end}", out[:, :, end - 1 : end], row, limit)
        yield close("The last tokens", out[:, :, -steps:], *at_end(inputs, steps))


@Check(
    "A state can be shared: every continuation with the same tokens gives the same bits.",
    cases=everywhere(9, causal=[True]),
    drawn=lambda seed: (
        *_drawn(seed, 9, 140),
        *_drawn(seed, 9, dtype="float32"),
        *(case for dtype in ("float32", "float16") for case in _drawn(seed, 260, dtype=dtype)[:2]),
    ),
    needs=("streaming",),
)
def any_number_of_sequences_go_on_from_a_state(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    rival, before = subject.inputs(case, variant=1), case.tokens // 2
    with torch.no_grad():
        _, state = extend(backend, inputs, slice(0, before), None)
        copied = [x.clone() for x in memory.tensors_in(state)]
        for tokens in sorted({1, case.tokens - before}):
            here = slice(before, before + tokens)
            first, later = extend(backend, inputs, here, state)
            expected = first.clone()
            apart, _ = extend(backend, rival, here, state)
            extend(backend, rival, here, later)
            again, _ = extend(backend, inputs, here, state)
            yield same_bits(f"{tokens} tokens once more", again, expected)
            yield same_bits(f"The output of {tokens} tokens, later", first, expected)
            if not torch.equal(rival.v[:, :, here], inputs.v[:, :, here]):
                apart.fill_(torch.nan)
                again, _ = extend(backend, inputs, here, state)
                yield same_bits("After another output was overwritten", again, expected)
    for x, old in zip(memory.tensors_in(state), copied, strict=True):
        yield same_bits("The state's own tensors", x, old)


@Check(
    "Gradients flow through states: incremental decoding gives the gradients of the full pass.",
    drawn=lambda seed: (*_drawn(seed, 3, 9), *_drawn(seed, 70)[:2], *_drawn(seed, 260)[:2], CHAIN),
    needs=("streaming", "gradients"),
)
def gradients_pass_through_states(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, backend, _, bounds = subject.plain_call(case)
    # A gradient contains the square of the denominator, which magnifies rounding of both passes once more.
    bound = 2 * float((bounds * condition(backend, inputs)).max())
    parts = [case.tokens // 2, case.tokens - 1 - case.tokens // 2, 1]
    streamed = gradients(lambda x: decode(backend, x, parts)[0], inputs, learned=backend)
    whole = gradients(partial(run, backend), inputs, learned=backend)
    yield from agree("through two states", streamed, whole, bound)
