"""Incremental decoding at all shapes: chunks of any size, reused buffers, states that are kept."""

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from efficient_attn.backend import Backend
from efficient_attn.conformance.cases import BORDERS, LONG_BORDERS, Case, Inputs, joint
from efficient_attn.conformance.compare import close, condition, distance, rounding, same_bits
from efficient_attn.conformance.records import Finding
from efficient_attn.conformance.subject import Subject, run
from efficient_attn.conformance.table import check

# A little more than the largest of BORDERS.
DECODED = Case(tokens=530, batch=1, heads=2, kv_heads=1, value_dim=3, causal=True)
LONGEST = DECODED.but(tokens=2100, masked=True, pattern=2)
# More tokens than the usual capacity of a preallocated cache, in parts of at most PREFILL.
MANY = Case(tokens=4200, batch=1, heads=1, kv_heads=1, causal=True)
PREFILL = 1050
# Tokens around every border are decoded one at a time.
AROUND = 3


def _drawn(seed: int, *lengths: int, dtype: str = "float64") -> tuple[Case, ...]:
    """Causal cases with as many queries as keys, as incremental decoding requires."""
    return tuple(case.but(keys=None) for case in joint(seed, *lengths, dtype=dtype) if case.causal)


@check(
    "Decoding in chunks of any size, even empty, from reused buffers gives the output of the full pass.",
    drawn=lambda seed: (
        *_drawn(seed, 2, 9, 70, 200),
        *(case for dtype in ("float32", "bfloat16", "float16") for case in _drawn(seed, 70, dtype=dtype)),
        *(case for dtype in ("bfloat16", "float16") for case in _drawn(seed, 230, dtype=dtype)[:3]),
    ),
    needs=("streaming",),
)
def parts_of_any_size_are_the_whole(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    wanted, bound = run(backend, inputs), rounding(backend, inputs, case.dtype)
    parts = _parts(case.tokens, random.Random(f"{subject.seed} {case}"))
    where = f"In parts of {', '.join(map(str, parts))}"
    yield from _streamed(where, backend, inputs, parts, wanted, bound)


def _parts(tokens: int, draws: random.Random) -> list[int]:
    """Chunk sizes in random order: single tokens, one large chunk, the rest, and two empty chunks."""
    singles = min(tokens, draws.randint(1, 3))
    large = draws.randint(0, tokens - singles)
    parts = [*[1] * singles, large, tokens - singles - large, 0, 0]
    draws.shuffle(parts)
    return parts


@check(
    "Decoding one token at a time is exact on either side of every block border, however long the state.",
    cases=(DECODED, DECODED.but(masked=True, pattern=2), DECODED.but(dtype="float32")),
    long=lambda seed: (LONGEST,),
    needs=("streaming",),
)
def long_states_are_whole(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    wanted, bound = run(backend, inputs), rounding(backend, inputs, case.dtype)
    steps, done = [], 0
    for border in (*BORDERS, *LONG_BORDERS):
        if done < border - AROUND and border + AROUND < case.tokens:
            steps += [border - AROUND - done, *[1] * 2 * AROUND]
            done = border + AROUND
    steps.append(case.tokens - done)
    yield from _streamed("Decoding", backend, inputs, steps, wanted, bound)
    if case.tokens >= LONGEST.tokens:
        # A token that is decoded alone cannot read later ones: each row of the full pass is compared.
        yield from _streamed("Decoding", backend, inputs, [1] * case.tokens, wanted, bound)


def _streamed(
    where: str, backend: Backend, inputs: Inputs, parts: list[int], wanted: Tensor, bound: Tensor
) -> Iterator[Finding]:
    """Findings on each chunk: its output when returned, and the same bits after the last call."""
    buffers = [torch.full_like(x[:, :, : max(parts)], torch.nan) for x in inputs[:3]]
    mask = None if inputs.key_mask is None else torch.zeros_like(inputs.key_mask[:, : max(parts)])
    state, start, kept = None, 0, []
    with torch.no_grad():
        for tokens in parts:
            here = slice(start, start + tokens)
            for buffer, x in zip(buffers, inputs[:3], strict=True):
                buffer[:, :, :tokens].copy_(x[:, :, here])
            if mask is not None and inputs.key_mask is not None:
                mask[:, :tokens].copy_(inputs.key_mask[:, here])
            q, k, v = (buffer[:, :, :tokens] for buffer in buffers)
            out, state = backend.extend(q, k, v, state, key_mask=None if mask is None else mask[:, :tokens])
            yield close(f"{where}, from {start}", out, wanted[:, :, here], bound[:, :, here])
            dtype = f"{where}: {out.dtype} instead of {wanted.dtype}"
            yield Finding(dtype, float(out.dtype != wanted.dtype), 0.0)
            kept.append((out, out.clone()))
            start += tokens
            for buffer in buffers:
                buffer.fill_(torch.nan)
            if mask is not None:
                mask.logical_not_()
        for number, (out, before) in enumerate(kept):
            yield same_bits(f"{where}: part {number} at the end", out, before)


@check(
    "A state of thousands of tokens loses none, and half precision does not stall its sums.",
    cases=(MANY, MANY.but(tokens=1400, dtype="bfloat16", norm=0.0)),
    needs=("streaming",),
)
def states_of_thousands_are_whole(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    # The last tokens outweigh the others, so that they show if they are lost.
    steps = 400 if case.dtype == "bfloat16" else 2
    inputs.v[:, :, -steps:] += 8.0
    last = inputs._replace(q=inputs.q[:, :, -steps:])
    state, start, outputs = None, 0, []
    with torch.no_grad():
        wanted, bound = run(backend, last), rounding(backend, last, case.dtype)
        while start < case.tokens:
            end = start + max(1, min(PREFILL, case.tokens - steps - start))
            out, state = _extend(backend, inputs, slice(start, end), state)
            if end - start > 1:
                row = Inputs(inputs.q[:, :, end - 1 : end], inputs.k[:, :, :end], inputs.v[:, :, :end], None)
                limit = rounding(backend, row, case.dtype)
                yield close(f"The last token of {end}", out[:, :, -1:], run(backend, row), limit)
            start = end
            outputs.append(out)
    yield close("The last tokens", torch.cat(outputs, dim=2)[:, :, -steps:], wanted, bound)


@check(
    "A state can be shared: every continuation with the same tokens gives the same bits.",
    drawn=lambda seed: (
        *_drawn(seed, 9, 140),
        *_drawn(seed, 9, dtype="float32"),
        *(case for dtype in ("float32", "float16") for case in _drawn(seed, 260, dtype=dtype)[:2]),
    ),
    needs=("streaming",),
)
def any_number_of_sequences_go_on_from_a_state(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    before = case.tokens // 2
    with torch.no_grad():
        _, state = _extend(backend, inputs, slice(0, before), None)
        copied = [x.clone() for x in _tensors(state)]
        for tokens in sorted({1, case.tokens - before}):
            here = slice(before, before + tokens)
            first, later = _extend(backend, inputs, here, state)
            kept = first.clone()
            other, _ = _extend(backend, subject.inputs(case, other=1), here, state)
            _extend(backend, subject.inputs(case, other=1), here, later)
            again, _ = _extend(backend, inputs, here, state)
            yield same_bits(f"{tokens} tokens once more", again, kept)
            yield same_bits(f"The output of {tokens} tokens, later", first, kept)
            if not torch.equal(subject.inputs(case, other=1).v[:, :, here], inputs.v[:, :, here]):
                other.fill_(torch.nan)
                again, _ = _extend(backend, inputs, here, state)
                yield same_bits("After another output was overwritten", again, kept)
    for x, old in zip(_tensors(state), copied, strict=True):
        yield same_bits("The state's own tensors", x, old)


@check(
    "Gradients flow through states: incremental decoding gives the gradients of the full pass.",
    drawn=lambda seed: (*_drawn(seed, 3, 9), *_drawn(seed, 70)[:2], *_drawn(seed, 260)[:2]),
    needs=("streaming", "gradients"),
)
def gradients_pass_through_states(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    # A gradient contains the square of the denominator, which magnifies rounding of both passes once more.
    bound = 2 * float((rounding(backend, inputs, case.dtype) * condition(backend, inputs)).max())
    learned = list(backend.parameters())

    def gradients(streamed: bool) -> tuple[Tensor | None, ...]:
        leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
        given = inputs.of(*leaves)
        out = _in_three(backend, given, case.tokens) if streamed else run(backend, given)
        return torch.autograd.grad(out.square().sum(), [*leaves, *learned], allow_unused=True)

    names = ["q", "k", "v", *(name for name, _ in backend.named_parameters())]
    for name, got, wanted in zip(names, gradients(True), gradients(False), strict=True):
        if wanted is not None:
            got = torch.full_like(wanted, torch.nan) if got is None else got
            size = max(1.0, float(wanted.abs().max()))
            yield Finding(f"Gradient w.r.t. {name} through two states", distance(got, wanted), bound * size)


@check(
    "Values without columns extend a state: the output has no columns either.",
    drawn=lambda seed: tuple(case.but(value_dim=0) for case in _drawn(seed, 3, 9)),
    needs=("streaming",),
)
def values_without_columns_are_streamed(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    state = None
    for here in (slice(0, 1), slice(1, 1), slice(1, case.tokens)):
        out, state = _extend(backend, inputs, here, state)
        shape = (case.batch, case.heads, here.stop - here.start, 0)
        yield Finding(f"Shape {list(out.shape)} instead of {list(shape)}", float(out.shape != shape), 0.0)


def _in_three(backend: Backend, inputs: Inputs, tokens: int) -> Tensor:
    outputs, state = [], None
    for here in (slice(0, tokens // 2), slice(tokens // 2, tokens - 1), slice(tokens - 1, tokens)):
        out, state = _extend(backend, inputs, here, state)
        outputs.append(out)
    return torch.cat(outputs, dim=2)


def _extend(backend: Backend, inputs: Inputs, here: slice, state: Any) -> tuple[Tensor, Any]:
    q, k, v = (x[:, :, here] for x in inputs[:3])
    key_mask = None if inputs.key_mask is None else inputs.key_mask[:, here]
    return backend.extend(q, k, v, state, key_mask=key_mask)


def _tensors(state: Any) -> list[Tensor]:
    """All tensors of a state, in nested tuples and lists."""
    if isinstance(state, Tensor):
        return [state]
    return [x for one in state for x in _tensors(one)] if isinstance(state, tuple | list) else []
