"""What masked keys may do: nothing."""

import math
from collections.abc import Iterator

import torch

from efficient_attn.conformance.cases import Case, Inputs, both, everywhere, joint
from efficient_attn.conformance.compare import close, largest, rounding, same_bits
from efficient_attn.conformance.records import Finding
from efficient_attn.conformance.subject import Subject, run
from efficient_attn.conformance.table import check

MASK = ("key_mask",)
DTYPES = ("float64", "float32", "bfloat16", "float16")


@check(
    "The contents of a masked key and its value change no bit, not even where they are NaN or infinite.",
    cases=(case for dtype in DTYPES for case in everywhere(2, 7, 65, dtype=dtype) if case.masked),
    drawn=lambda seed: tuple(case for case in joint(seed, 9, 200, 513) if case.masked and case.batch < 4),
    needs=MASK,
)
def padding_contents_change_no_bit(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    wanted = run(backend, inputs)
    for filling in (100.0, math.nan, math.inf):
        yield same_bits(f"Padding of {filling}", run(backend, padded_with(filling, inputs)), wanted)


@check(
    "However many masked keys follow, the output is the same to rounding.",
    cases=(case for case in everywhere(1, 7, 65) if not case.causal and not case.masked),
    needs=("key_mask", "cross"),
)
def amount_of_padding_does_not_matter(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs = subject.inputs(case)
    for more in (1, 3, 64):
        backend = subject.build(case, max_tokens=case.k_tokens + more)
        padded = _appended(inputs, more)
        wanted, bound = run(backend, inputs), rounding(backend, inputs, case.dtype)
        yield close(f"{more} masked keys of NaN appended", run(backend, padded), wanted, bound)


@check(
    "However many masked tokens stand before or after a sequence, its outputs are the same to rounding.",
    cases=(*(case for case in everywhere(1, 7, 65) if not case.masked), *both(Case(tokens=200, batch=1))),
    needs=MASK,
    unless=("needs_max_tokens",),
)
def padding_on_either_side_does_not_matter(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    wanted, bound = run(backend, inputs), rounding(backend, inputs, case.dtype)
    for before, after in ((0, 1), (1, 0), (3, 0), (0, 64), (64, 3)):
        out = run(backend, _surrounded(inputs, before, after))[:, :, before : before + case.tokens]
        yield close(f"{before} masked tokens before and {after} after", out, wanted, bound)


@check(
    "A query that may see no key gets zeros, and finite gradients: zeros where nothing is read.",
    cases=(one for dtype in DTYPES for n in (1, 3, 65) for one in both(Case(tokens=n, dtype=dtype))),
    needs=MASK,
)
def blind_queries_give_zeros(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    mask = torch.ones(case.batch, case.k_tokens, dtype=torch.bool)
    mask[0] = False
    # Where a token reads only those before it, the first of the other sequences is blind too.
    mask[1:, 0] = not case.causal
    leaves = [x.requires_grad_() for x in inputs[:3]]
    out = run(backend, inputs._replace(key_mask=mask))
    yield Finding("A sequence of masked keys", largest(out[0]), 0.0)
    if case.causal:
        yield Finding("A first token that is masked", largest(out[1:, :, 0]), 0.0)
    if subject.promises.gradients:
        for name, gradient in zip("qkv", torch.autograd.grad(out.square().sum(), leaves), strict=True):
            yield Finding(f"Its gradient by {name}", largest(gradient[0]), 0.0)
            if subject.promises.nonnegative or case.dtype in ("float64", "float32"):
                # A signed sum close to zero may have a derivative that no half-precision number holds.
                yield Finding(f"Gradient by {name}", 0.0 if gradient.isfinite().all() else math.nan, 0.0)


@check(
    "Masked keys and values get gradients of exactly zero.",
    cases=(case for case in everywhere(2, 7) if case.masked),
    needs=("key_mask", "gradients"),
)
def masked_keys_get_no_gradient(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs = padded_with(math.nan, subject.inputs(case))
    leaves = [x.requires_grad_() for x in inputs[:3]]
    out = run(subject.build(case), inputs)
    assert inputs.key_mask is not None
    hidden = ~inputs.key_mask[:, None, :].expand(leaves[1].shape[:3])
    gradients = torch.autograd.grad(out.square().sum(), leaves)
    yield Finding("Gradient by q", 0.0 if gradients[0].isfinite().all() else math.nan, 0.0)
    for name, gradient in zip("kv", gradients[1:], strict=True):
        yield Finding(f"Gradient by masked {name}", largest(gradient[hidden]), 0.0)
        yield Finding(f"Gradient by {name}", 0.0 if gradient.isfinite().all() else math.nan, 0.0)


def padded_with(filling: float, inputs: Inputs) -> Inputs:
    """The inputs with something else in the masked keys and values."""
    assert inputs.key_mask is not None
    hidden = ~inputs.key_mask[:, None, :, None]
    return inputs._replace(k=inputs.k.masked_fill(hidden, filling), v=inputs.v.masked_fill(hidden, filling))


def _appended(inputs: Inputs, more: int) -> Inputs:
    mask = torch.arange(inputs.k.shape[2] + more) < inputs.k.shape[2]
    k, v = (
        torch.cat([x, x.new_full((*x.shape[:2], more, x.shape[3]), math.nan)], dim=2) for x in inputs[1:3]
    )
    return inputs._replace(k=k, v=v, key_mask=mask.expand(len(k), -1))


def _surrounded(inputs: Inputs, before: int, after: int) -> Inputs:
    """Masked tokens of NaN around keys and values, and queries of ones beside them."""

    def around(x: torch.Tensor, filling: float) -> torch.Tensor:
        parts = [x.new_full((*x.shape[:2], n, x.shape[3]), filling) for n in (before, after)]
        return torch.cat([parts[0], x, parts[1]], dim=2)

    position = torch.arange(before + inputs.k.shape[2] + after) - before
    mask = (position >= 0) & (position < inputs.k.shape[2])
    q, k, v = around(inputs.q, 1.0), around(inputs.k, math.nan), around(inputs.v, math.nan)
    return Inputs(q, k, v, mask.expand(len(k), -1))
