"""Inputs: any size and memory layout, no in-place writes, no mixing of sequences or heads."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from efficient_attn.backend import Backend
from efficient_attn.conformance.cases import LARGE, LAYOUTS, Case, Inputs, both, everywhere, joint
from efficient_attn.conformance.compare import close, largest, rounding, same_bits
from efficient_attn.conformance.masks import padded_with
from efficient_attn.conformance.records import Finding
from efficient_attn.conformance.streams import decode
from efficient_attn.conformance.subject import Subject, run
from efficient_attn.conformance.table import Check

DTYPES = ("float64", "float32", "bfloat16", "float16")
SMALL = Case(tokens=5)
# Entries of a vector register: of float32 with 512 bits.
LANES = 16


@Check(
    "The output has the last dimension of v, and the other dimensions, dtype and device of q.",
    cases=(
        variant
        for dtype in DTYPES
        for case in (Case(tokens=3, dtype=dtype), Case(tokens=3, value_dim=7, head_dim=5, dtype=dtype))
        for variant in (*both(case), *both(case.but(keys=8)))
    ),
)
def outputs_have_the_shape_and_dtype_asked_for(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs = subject.inputs(case)
    out = run(subject.build(case), inputs)
    expected = torch.Size([*inputs.q.shape[:-1], case.value_dim])
    yield Finding(f"Shape {list(out.shape)} instead of {list(expected)}", float(out.shape != expected), 0.0)
    yield Finding(f"{out.dtype} instead of {inputs.q.dtype}", float(out.dtype != inputs.q.dtype), 0.0)
    yield Finding(f"{out.device} instead of {inputs.q.device}", float(out.device != inputs.q.device), 0.0)


@Check(
    "Empty batches, queries and keys give empty or zero outputs, and a backward pass.",
    cases=(
        variant
        for case in (SMALL.but(batch=0), SMALL.but(tokens=0, keys=0), SMALL.but(tokens=0, keys=5))
        for variant in (*both(case), *both(case.but(masked=True)))
    ),
)
def empty_inputs_give_empty_outputs(subject: Subject, case: Case) -> Iterator[Finding]:
    yield from _empty(subject, case)


@Check("Queries without any key give zeros.", cases=both(SMALL.but(keys=0))[:1], needs=("cross",))
def no_keys_give_zeros(subject: Subject, case: Case) -> Iterator[Finding]:
    yield from _empty(subject, case)


def _empty(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs = subject.inputs(case)
    leaves = [x.requires_grad_() for x in inputs[:3]]
    out = run(subject.build(case), inputs)
    expected = torch.zeros(case.batch, case.heads, case.tokens, case.value_dim, dtype=inputs.q.dtype)
    yield same_bits("Output", out, expected)
    if subject.promises.gradients:
        for name, gradient in zip("qkv", torch.autograd.grad(out.sum(), leaves), strict=True):
            yield Finding(f"Gradient w.r.t. {name}", largest(gradient), 0.0)


@Check(
    "Transposed, sliced, expanded and shared tensors give the output of contiguous ones, also in `extend`.",
    cases=(*everywhere(3, 7), *LARGE),
    drawn=lambda seed: joint(seed, 9),
)
def layout_in_memory_does_not_matter(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    plain, bound = _outputs(subject, backend, inputs), rounding(backend, inputs, case.dtype)
    for where, layout in LAYOUTS.items():
        arranged = inputs.each(layout)
        for out, expected in zip(_outputs(subject, backend, arranged), plain, strict=True):
            yield close(where, out, expected, bound)
        for x, before in zip(arranged[:3], inputs[:3], strict=True):
            yield same_bits(f"{where}: an input after the call", x, before)
    for where, views in _views(inputs) if case.batch > 1 else ():
        copies = views.each(lambda x: x.clone(memory_format=torch.contiguous_format))
        bound = rounding(backend, copies, case.dtype)
        pairs = zip(_outputs(subject, backend, views), _outputs(subject, backend, copies), strict=True)
        for out, expected in pairs:
            yield close(where, out, expected, bound)


@torch.no_grad()
def _outputs(subject: Subject, backend: Backend, inputs: Inputs) -> list[Tensor]:
    """The output, and the output of `extend` in two parts where it is promised."""
    outputs, tokens = [run(backend, inputs)], inputs.q.shape[2]
    if subject.promises.streaming and backend.problem.causal and tokens == inputs.k.shape[2]:
        outputs.append(decode(backend, inputs, [tokens // 2, tokens - tokens // 2])[0])
    return outputs


def _views(inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    """Inputs whose entries share memory."""
    for names in ("qkv", "q", "k", "v"):
        arranged = {name: x[:1, :1].expand_as(x) for name, x in inputs._asdict().items() if name in names}
        yield f"Expanded {names}", inputs._replace(**arranged)
    # Sequences with a common prefix, of which each has a mask.
    shared = inputs._replace(k=inputs.k[:1].expand_as(inputs.k), v=inputs.v[:1].expand_as(inputs.v))
    yield "k and v expanded over the batch", shared
    if inputs.q.shape == inputs.k.shape == inputs.v.shape:
        yield "One tensor for q, k and v", inputs.of(inputs.q, inputs.q, inputs.q)
    if inputs.key_mask is not None:
        for where, mask in (("batch", inputs.key_mask[:1]), ("keys", inputs.key_mask[:, :1])):
            yield (
                f"A mask expanded over the {where}",
                inputs._replace(key_mask=mask.expand_as(inputs.key_mask)),
            )


@Check(
    "Inputs are not modified in place, forward, backward or in `extend`.",
    cases=(*everywhere(3, 65), Case(tokens=200, masked=True), *LARGE),
    drawn=lambda seed: joint(seed, 9, 140),
)
def inputs_are_not_written_to(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs = subject.inputs(case)
    # What is masked, or not a number, invites to be replaced.
    for filling in (None, math.nan, math.inf) if case.masked else (None,):
        yield from _written(subject, case, inputs if filling is None else padded_with(filling, inputs))


def _written(subject: Subject, case: Case, inputs: Inputs) -> Iterator[Finding]:
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
        *(variant for dtype in DTYPES for variant in everywhere(7, dtype=dtype)),
        *both(Case(tokens=130, batch=1, heads=2, kv_heads=1, masked=True, dtype="float32")),
        *both(Case(tokens=9, heads=2, kv_heads=1, head_dim=64, value_dim=64)),
    ),
)
def a_nan_shows_where_it_is_read(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    weights = backend.attention_weights(inputs.q, inputs.k, key_mask=inputs.key_mask).detach()
    for token in sorted({0, case.tokens // 2, case.tokens - 1}):
        # Torch's fused kernel gives 0 for fewer scores than LANES that are all NaN.
        read = (weights[0, 0, :, token] != 0) & ((weights[0, 0] != 0).sum(-1) > 1)
        for name, value in (("v", math.nan), ("v", math.inf), ("v", -math.inf), ("k", math.nan)):
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
            v = inputs.v.clone().requires_grad_()
            out = run(backend, inputs._replace(v=v))
            flowing = torch.ones_like(out)
            flowing[0, 0, token, -1] = math.nan
            (gradient,) = torch.autograd.grad(out, v, flowing)
            clean = gradient[0, 0, weights[0, 0, token] != 0, -1].isfinite()
            yield Finding(f"NaN upstream at {token}: gradients of v without it", float(clean.sum()), 0.0)


@Check(
    "Sequences and heads are independent: others do not affect an output, even if they are long or NaN.",
    cases=everywhere(3, 7, 65),
)
def batch_invariance(subject: Subject, case: Case) -> Iterator[Finding]:
    for what, axis in (("sequence", 0), ("head", 1)):
        yield from _apart(subject, case, what, axis)


def _apart(subject: Subject, case: Case, what: str, axis: int) -> Iterator[Finding]:
    """Compare the first sequence or head where all others have other contents."""
    inputs, backend = subject.inputs(case), subject.build(case)
    bound = rounding(backend, inputs, case.dtype).narrow(axis, 0, 1)
    expected = run(backend, inputs).narrow(axis, 0, 1)
    for where, factor in (("Zeros", 0.0), ("Long vectors", 20.0), ("NaN", math.nan)):
        changed = inputs.of(*(x.clone() for x in inputs[:3]))
        for x in changed[:3]:
            x.narrow(axis, 1, x.shape[axis] - 1).mul_(factor)
        out = run(backend, changed).narrow(axis, 0, 1)
        yield close(f"{where} in another {what}", out, expected, bound)
