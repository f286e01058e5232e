"""Checks of inputs: size, memory layout, no in-place writes, and independent sequences, heads and columns."""

import math
from collections.abc import Iterator
from operator import itemgetter

import torch
from torch import Tensor

from efficient_attn.backend import Backend
from efficient_attn.conformance.cases import (
    BOTH,
    DTYPES,
    GROUPS,
    LARGE,
    LARGE_BATCH,
    LAYOUTS,
    MANY_PAIRS,
    MODEL,
    TWELVE,
    WIDE,
    CheckCase,
    Inputs,
    both,
    everywhere,
    joint,
    spread,
    vary,
)
from efficient_attn.conformance.records import Finding
from efficient_attn.conformance.subject import (
    Subject,
    agree,
    close,
    largest,
    results,
    rounding,
    run,
    same_bits,
)
from efficient_attn.conformance.table import Check, threads

SMALL = CheckCase(tokens=5)
# An input of the long form that every backend serves; another has everything at once.
LONG = CheckCase(tokens=2100, batch=2, heads=2, kv_heads=2)
WIDTHS = (WIDE, *vary(SMALL, head_dim=[64], value_dim=(64, 80, 96, 128)))
# Batches of which products are split differently among threads, and dtypes whose rounding shows it.
ROUNDED = ("float32", "bfloat16")
SEVEN = CheckCase(tokens=7, batch=7, heads=4, value_dim=3, pattern=3)
SINGLE = SEVEN.but(heads=1, kv_heads=1, head_dim=32, value_dim=64)
SINGLE_HEAD = (*vary(SINGLE, tokens=(7, 513), dtype=["float32"]), SINGLE.but(tokens=300, dtype="bfloat16"))
# Entries of a vector register: of float32 with 512 bits.
LANES = 16


@Check(
    "Empty batches, queries and keys give empty or zero outputs, and a backward pass.",
    cases=(
        SMALL.but(keys=0),
        *vary(
            SMALL.but(batch=0),
            SMALL.but(tokens=0, keys=0),
            SMALL.but(tokens=0, keys=5),
            masked=(False, True),
            causal=(False, True),
        ),
    ),
)
def empty_inputs_give_empty_outputs(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    traced = subject.inputs(case).leaves()
    out = run(subject.build(case), traced)
    expected = torch.zeros(case.batch, case.heads, case.tokens, case.value_dim, dtype=traced.q.dtype)
    yield same_bits("Output", out, expected)
    if subject.promises.gradients:
        for name, gradient in zip("qkv", torch.autograd.grad(out.sum(), traced[:3]), strict=True):
            yield Finding(f"Gradient w.r.t. {name}", largest(gradient), 0.0)


@Check(
    "Transposed, sliced, expanded and shared tensors give the output of contiguous ones, also in `extend`.",
    cases=(*everywhere(3, 7), *LARGE, MODEL),
    drawn=lambda seed: joint(seed, 9),
)
@torch.no_grad()
def layout_in_memory_does_not_matter(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, backend, _, bound = subject.plain_call(case)
    plain = results(subject, backend, inputs)
    for where, layout in LAYOUTS.items():
        arranged = inputs.each(layout)
        yield from agree(where, results(subject, backend, arranged), plain, bound)
        for x, before in zip(arranged[:3], inputs[:3], strict=True):
            yield same_bits(f"{where}: an input after the call", x, before)
    for where, views in _views(inputs) if case.batch > 1 else ():
        copies = views.each(lambda x: x.clone(memory_format=torch.contiguous_format))
        bound = rounding(backend, copies, case.dtype)
        yield from agree(where, results(subject, backend, views), results(subject, backend, copies), bound)


def _views(inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    for names in ("qkv", "q", "k", "v"):
        arranged = {name: x[:1, :1].expand_as(x) for name, x in inputs._asdict().items() if name in names}
        yield f"Expanded {names}", inputs._replace(**arranged)
    # Sequences with a common prefix, each with a mask of its own, and heads that share keys.
    for axis, where in enumerate(("batch", "heads")):
        k, v = (x.narrow(axis, 0, 1).expand_as(x) for x in (inputs.k, inputs.v))
        yield f"k and v expanded over the {where}", inputs._replace(k=k, v=v)
    if inputs.q.shape == inputs.k.shape == inputs.v.shape:
        yield "One tensor for q, k and v", inputs.of(inputs.q, inputs.q, inputs.q)
    if inputs.key_mask is not None:
        for where, mask in (("batch", inputs.key_mask[:1]), ("keys", inputs.key_mask[:, :1])):
            expanded = inputs._replace(key_mask=mask.expand_as(inputs.key_mask))
            yield f"A mask expanded over the {where}", expanded


@Check(
    "Inputs are not modified in place, forward, backward or in `extend`.",
    cases=(*everywhere(3, 65), CheckCase(tokens=200, masked=True), *LARGE),
    drawn=lambda seed: joint(seed, 9, 140),
)
def inputs_are_not_written_to(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs = subject.inputs(case)
    # A backend may replace masked or non-finite entries in place.
    for filling in (None, math.nan, math.inf) if case.masked else (None,):
        yield from _written(subject, case, inputs if filling is None else inputs.padded(filling))


def _written(subject: Subject, case: CheckCase, inputs: Inputs) -> Iterator[Finding]:
    backend = subject.build(case)
    before = [None if x is None else x.clone() for x in inputs]
    versions = [None if x is None else x._version for x in inputs]
    run(backend, inputs)
    if subject.promises.gradients:
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        # An in-place write is legal on a non-leaf tensor, where autograd does not raise.
        run(backend, inputs.of(*(x.view_as(x) for x in leaves))).square().sum().backward()
    if subject.promises.streaming and case.causal and case.tokens == case.k_tokens:
        _, state = backend.extend(*inputs[:3], key_mask=inputs.key_mask)
        backend.extend(*inputs[:3], state, key_mask=inputs.key_mask)
    for name, x, old, version in zip(inputs._fields, inputs, before, versions, strict=True):
        if x is not None and old is not None:
            yield Finding(f"Writes into {name}", float(x._version != version), 0.0)
            yield same_bits(f"{name} after the calls", x, old)
            asks = x.grad is not None or x.requires_grad
            yield Finding(f"Writes the gradient of {name}, or asks for it", float(asks), 0.0)


@Check(
    "NaN and infinity in a real token show in every output that reads it, NaN upstream in the gradients.",
    cases=(
        *everywhere(7, dtype=DTYPES),
        *both(
            CheckCase(tokens=130, batch=1, heads=2, kv_heads=1, masked=True, dtype="float32"),
            CheckCase(tokens=9, heads=2, kv_heads=1, head_dim=64, value_dim=64),
        ),
    ),
)
def a_nan_shows_where_it_is_read(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    weights = backend.attention_weights(inputs.q, inputs.k, key_mask=inputs.key_mask).detach()
    # Weights may depend on positions alone.
    reads_keys = not torch.equal(run(backend, inputs), run(backend, inputs._replace(k=-inputs.k)))
    contents = (("v", math.nan), ("v", math.inf), ("v", -math.inf), *[("k", math.nan)] * reads_keys)
    for token in sorted({0, case.tokens // 2, case.tokens - 1}):
        # Torch's fused kernel gives 0 for fewer scores than LANES that are all NaN.
        read = (weights[0, 0, :, token] != 0) & ((weights[0, 0] != 0).sum(-1) > 1)
        for name, value in contents:
            x = getattr(inputs, name).clone()
            x[0, 0, token, -1] = value
            out = run(backend, inputs._replace(**{name: x}))[0, 0]
            clean = (out[:, -1:] if name == "v" else out)[read].isfinite()
            yield Finding(f"{value} of {name} at {token}: outputs without it", float(clean.sum()), 0.0)
        if (weights[0, 0, token] != 0).sum() >= LANES:
            q = inputs.q.clone()
            q[0, 0, token, -1] = math.nan
            clean = run(backend, inputs._replace(q=q))[0, 0, token].isfinite()
            yield Finding(f"NaN of q at {token}: outputs without it", float(clean.sum()), 0.0)
        if subject.promises.gradients:
            traced = inputs.leaves()
            out = run(backend, traced)
            flowing = torch.ones_like(out)
            flowing[0, 0, token, -1] = math.nan
            (gradient,) = torch.autograd.grad(out, traced.v, flowing)
            clean = gradient[0, 0, weights[0, 0, token] != 0, -1].isfinite()
            yield Finding(f"NaN upstream at {token}: gradients of v without it", float(clean.sum()), 0.0)


@Check(
    "A sequence of a batch has the same output as in a call of its own, even if others are long or NaN.",
    cases=everywhere(3, 7, 65),
    drawn=lambda seed: (
        *joint(seed, 3, 9, 70, 200),
        *joint(seed, 9, 70, dtype="float32"),
        *both(LARGE_BATCH, MODEL, MODEL.but(dtype="bfloat16")),
        *vary(SMALL, batch=(8, 16, 32)),
        MANY_PAIRS.but(dtype="float32"),
    ),
    long=lambda seed: (LONG, *joint(seed, 2100)[:2]),
)
def every_sequence_is_its_single_call(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, backend, out, bound = subject.plain_call(case)
    for b in spread(case.batch):
        alone = inputs.each(itemgetter(slice(b, b + 1)))
        yield close(f"Sequence {b} alone", run(backend, alone), out[b : b + 1], bound[b : b + 1])
    yield from _beside(inputs, backend, 0, out, bound)


@Check(
    "A sequence has equal bits alone, in a batch of two and in one of seven, on one thread and on two.",
    cases=both(*vary(SEVEN, masked=BOTH, dtype=ROUNDED), *SINGLE_HEAD),
    capability="batch_invariant",
    by_luck=True,
)
@torch.no_grad()
def bits_do_not_depend_on_the_batch(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    findings: list[Finding] = []
    for count in (1, 2):
        with threads(count):
            whole = results(subject, backend, inputs)
            for part in (slice(1), slice(-1, None), slice(-2, None)):
                copies = inputs.each(itemgetter(part)).each(torch.clone)
                expected = [(name, x[part]) for name, x in whole]
                where = f"in a batch of {len(copies.q)}, threads: {count}"
                findings += agree(where, results(subject, backend, copies), expected)
    yield from findings


def _beside(inputs: Inputs, backend: Backend, axis: int, out: Tensor, bound: Tensor) -> Iterator[Finding]:
    """Compare the first sequence or head while the contents of all others change."""
    first, limit = out.narrow(axis, 0, 1), bound.narrow(axis, 0, 1)
    for factor in (0.0, 20.0, math.nan):
        changed = inputs.of(*(x.clone() for x in inputs[:3]))
        for x in changed[:3]:
            x.narrow(axis, 1, x.shape[axis] - 1).mul_(factor)
        yield close(f"Beside others times {factor}", run(backend, changed).narrow(axis, 0, 1), first, limit)


@Check(
    "A head has the same output as in a call of its own with its group's keys, even if others are NaN.",
    cases=everywhere(3, 7, 65),
    drawn=lambda seed: (
        *joint(seed, 3, 9, 70),
        *joint(seed, 9, dtype="float32"),
        *both(GROUPS, MODEL, MODEL.but(dtype="bfloat16")),
        *(*TWELVE, GROUPS.but(heads=64, kv_heads=64)),
        *LARGE,
    ),
    long=lambda seed: (LONG, *joint(seed, 2100)[:2]),
)
def every_head_is_its_single_call(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, backend, out, bound = subject.plain_call(case)
    single, state = subject.build(case.but(heads=1, kv_heads=1)), backend.state_dict()
    # Heads may have parameters of their own, or slopes of their positions.
    alike = all(x.shape == single.state_dict()[name].shape for name, x in state.items())
    alike = alike and not subject.position_dependent
    if alike:
        single.load_state_dict(state)
    for head in spread(case.heads):
        group = head // (case.heads // case.kv_heads)
        alone = inputs.of(*(x[:, i : i + 1] for x, i in zip(inputs[:3], (head, group, group), strict=True)))
        if not alike:
            # The head keeps its place among copies of itself.
            alone = alone.of(*(x.repeat(1, case.heads, 1, 1) for x in alone[:3]))
        got = run(single if alike else backend, alone)[:, 0 if alike else head]
        yield close(f"Head {head} alone", got, out[:, head], bound[:, head])
    yield from _beside(inputs, backend, 1, out, bound)


@Check(
    "A column of the values has the same output as in a call of its own, for any key and value dimensions.",
    drawn=lambda seed: (*joint(seed, 3, 9), *joint(seed, 9, dtype="float32"), *WIDTHS, *LARGE),
)
def columns_of_values_are_computed_alone(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, backend, out, bound = subject.plain_call(case)
    for column in spread(case.value_dim):
        alone = run(backend, inputs._replace(v=inputs.v[..., column : column + 1]))
        yield close(f"Column {column} of v alone", alone, out[..., column : column + 1], bound)
