"""Key masks: masked keys have no effect."""

import math
from collections.abc import Iterator

import torch

from efficient_attn.conformance.cases import LONG_KEYS, Case, Inputs, both, everywhere, joint
from efficient_attn.conformance.compare import close, largest, rounding, same_bits
from efficient_attn.conformance.records import Finding
from efficient_attn.conformance.subject import Subject, run
from efficient_attn.conformance.table import Check

MASK = ("key_mask",)
DTYPES = ("float64", "float32", "bfloat16", "float16")
# Heads as wide as in real models, and a sequence beyond usual blocks.
WIDE = (
    Case(tokens=3, batch=3, heads=4, kv_heads=2, head_dim=64, value_dim=64),
    Case(tokens=130, heads=2, kv_heads=1, head_dim=64, value_dim=5),
    Case(tokens=5, heads=2, kv_heads=2, head_dim=128, value_dim=128),
)


@Check(
    "The contents of masked keys and values change no bit, even if they are NaN or infinite.",
    cases=(case for dtype in DTYPES for case in everywhere(2, 7, 65, dtype=dtype) if case.masked),
    drawn=lambda seed: (
        *(case for case in joint(seed, 9, 200, 513) if case.masked and case.batch < 4),
        *(case.but(masked=True, pattern=2) for case in LONG_KEYS),
    ),
    needs=MASK,
)
def padding_contents_change_no_bit(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    expected = run(backend, inputs)
    for filling in (100.0, math.nan, math.inf):
        yield same_bits(f"Padding of {filling}", run(backend, padded_with(filling, inputs)), expected)


@Check(
    "The number of masked keys appended changes the output by no more than rounding.",
    cases=(case for case in everywhere(1, 7, 65) if not case.causal and not case.masked),
    needs=("key_mask", "cross"),
)
def amount_of_padding_does_not_matter(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs = subject.inputs(case)
    for padding in (1, 3, 64):
        backend = subject.build(case, max_tokens=case.k_tokens + padding)
        padded = _appended(inputs, padding)
        expected, bound = run(backend, inputs), rounding(backend, inputs, case.dtype)
        yield close(f"{padding} masked keys of NaN appended", run(backend, padded), expected, bound)


@Check(
    "The number of masked tokens before or after a sequence changes its outputs by no more than rounding.",
    cases=(*(case for case in everywhere(1, 7, 65) if not case.masked), *both(Case(tokens=200, batch=1))),
    needs=MASK,
    unless=("needs_max_tokens",),
)
def padding_on_either_side_does_not_matter(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    expected, bound = run(backend, inputs), rounding(backend, inputs, case.dtype)
    # In the longest case whole tiles are masked, which have neither a largest score nor a sum.
    tiles = ((1100, 0), (0, 1100)) if case.tokens == 200 else ()
    for before, after in ((0, 1), (1, 0), (3, 0), (0, 64), (64, 3), *tiles):
        out = run(backend, _surrounded(inputs, before, after))[:, :, before : before + case.tokens]
        yield close(f"{before} masked tokens before and {after} after", out, expected, bound)


@Check(
    "Fully-masked rows give zero outputs and finite gradients, which are zero for their own inputs.",
    cases=(
        *(variant for dtype in DTYPES for n in (1, 3, 65) for variant in both(Case(tokens=n, dtype=dtype))),
        *(variant for dtype in DTYPES for case in WIDE for variant in both(case.but(dtype=dtype))),
        *LONG_KEYS,
    ),
    needs=MASK,
)
def blind_queries_give_zeros(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    mask = torch.ones(case.batch, case.k_tokens, dtype=torch.bool)
    mask[0] = False
    # In a causal case the first query of the other sequences is fully masked too.
    mask[1:, 0] = not case.causal
    leaves = [x.requires_grad_() for x in inputs[:3]]
    out = run(backend, inputs._replace(key_mask=mask))
    yield Finding("A sequence of masked keys", largest(out[0]), 0.0)
    if case.causal:
        yield Finding("A first token that is masked", largest(out[1:, :, 0]), 0.0)
    if subject.promises.gradients:
        for name, gradient in zip("qkv", torch.autograd.grad(out.square().sum(), leaves), strict=True):
            yield Finding(f"Gradient of a fully-masked sequence w.r.t. {name}", largest(gradient[0]), 0.0)
            if subject.promises.nonnegative or case.dtype in ("float64", "float32"):
                # A signed denominator close to zero may have a gradient that overflows half precision.
                yield Finding(f"Gradient w.r.t. {name}", 0.0 if gradient.isfinite().all() else math.nan, 0.0)


@Check(
    "Gradients with respect to masked keys and values are exactly zero.",
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
    yield Finding("Gradient w.r.t. q", 0.0 if gradients[0].isfinite().all() else math.nan, 0.0)
    for name, gradient in zip("kv", gradients[1:], strict=True):
        yield Finding(f"Gradient w.r.t. masked {name}", largest(gradient[hidden]), 0.0)
        yield Finding(f"Gradient w.r.t. {name}", 0.0 if gradient.isfinite().all() else math.nan, 0.0)


def padded_with(filling: float, inputs: Inputs) -> Inputs:
    """The inputs with `filling` in the masked keys and values."""
    assert inputs.key_mask is not None
    hidden = ~inputs.key_mask[:, None, :, None]
    return inputs._replace(k=inputs.k.masked_fill(hidden, filling), v=inputs.v.masked_fill(hidden, filling))


def _appended(inputs: Inputs, padding: int) -> Inputs:
    mask = torch.arange(inputs.k.shape[2] + padding) < inputs.k.shape[2]
    k, v = (
        torch.cat([x, x.new_full((*x.shape[:2], padding, x.shape[3]), math.nan)], dim=2) for x in inputs[1:3]
    )
    return inputs._replace(k=k, v=v, key_mask=mask.expand(len(k), -1))


def _surrounded(inputs: Inputs, before: int, after: int) -> Inputs:
    """Inputs with masked NaN keys and values on either side, and queries of ones at these positions."""

    def around(x: torch.Tensor, filling: float) -> torch.Tensor:
        parts = [x.new_full((*x.shape[:2], n, x.shape[3]), filling) for n in (before, after)]
        return torch.cat([parts[0], x, parts[1]], dim=2)

    position = torch.arange(before + inputs.k.shape[2] + after) - before
    mask = (position >= 0) & (position < inputs.k.shape[2])
    q, k, v = around(inputs.q, 1.0), around(inputs.k, math.nan), around(inputs.v, math.nan)
    return Inputs(q, k, v, mask.expand(len(k), -1))
