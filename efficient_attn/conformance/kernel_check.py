"""Check of one fused kernel on one device against its formula in float64, run in a process of its own.

Every case is computed twice on memory filled with NaN, the long ones more often. All results must have the
same bits. The measure of errors is the materialised formula with operands of products in the kernel's
precision, and in float32 the backend on the CPU: the output may err twice as much, gradients four times, the
worst row ten times.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from efficient_attn.backends import build
from efficient_attn.conformance.cases import Inputs
from efficient_attn.conformance.subject import decode, run
from efficient_attn.contained import described
from efficient_attn.ops import naive, verdict
from efficient_attn.ops.paths import observed_kernels

# Mantissa bits of the operands of products, without the leading one; negative: tensor cores cut the rest off.
_BITS = {"bfloat16": 7, "float16": 10, "tf32": -10}
# Bounds on errors as multiples of the measure's. Gradients also err by the rounding of the stored output.
_FACTOR, _FACTOR_OF_GRADIENTS, _FACTOR_OF_ROWS = 2.0, 4.0, 10.0
_FLOAT32 = 1e-6
_BATCH, _HEADS, _KV_HEADS, _LONGEST_BATCH = 2, 4, 2, 1024
_TOLD = 5
# A race between warps shows in few calls. One of `causal-linear` on an H100 showed in 1 of 300.
_OFTEN_FROM, _OFTEN = 1000, 16


class KernelCase(NamedTuple):
    """Inputs: norm of scaled queries and keys, length, key mask, two query heads for each key head."""

    norm: float
    tokens: int
    masked: bool
    grouped: bool
    head_dim: int = 64


def cases_of(lengths: Sequence[int], head_dim: int = 64) -> list[KernelCase]:
    grid = itertools.product(lengths, (1, 5, 20), (False, True), (False, True))
    return [KernelCase(norm, tokens, masked, grouped, head_dim) for tokens, norm, masked, grouped in grid]


@dataclass(frozen=True, kw_only=True)
class CheckedKernel:
    """A fused kernel as the backend that it serves.

    Attributes:
        note: Name by which the kernel reports that it served a call.
        bits: Mantissa bits of operands by precision; None: the backend on the CPU is the measure.
        causal: Whether calls are causal; None: only with grouped heads.
        wide_lengths: Lengths with heads of 128, which another tile serves.
        options: Options of the backend, by default the number of features of the check.
    """

    backend: str
    note: str
    lengths: Sequence[int]
    bits: Mapping[str, int | None]
    wide_lengths: Sequence[int] = ()
    causal: bool | None = False
    streams: bool = False
    options: Mapping[str, int] = field(default_factory=dict)
    trained: bool = True
    module: Callable[..., Any] | None = None

    def build(self, case: KernelCase, precision: str, features: int) -> Any:
        """The backend, with directions that both half precisions can hold."""
        size = self.options or {"num_features": features}
        causal = case.grouped if self.causal is None else self.causal
        backend = build(self.backend, head_dim=case.head_dim, num_heads=_HEADS, causal=causal, **size)
        for x in backend.buffers() if precision.endswith("16") else ():
            x.copy_(_rounded(x.double(), _BITS["bfloat16"]))
        return backend


# Kernels that visit some blocks of the scores.
_scores = partial(CheckedKernel, note="flex", bits=_BITS, causal=None)

# The slowest first, since kernels are checked in parallel.
SUBJECTS = {
    "causal-linear": CheckedKernel(
        backend="performer-positive",
        note="triton causal-linear",
        # More chunks than segments of the scan in the last one.
        lengths=(1, 63, 64, 65, 127, 129, 1000, 4097),
        wide_lengths=(65, 1025),
        # Features beyond the range of float16 are numbers of bfloat16.
        bits={"bfloat16": 7, "float16": 7, "float32": None},
        causal=True,
        streams=True,
    ),
    # Every compiled version of FlexAttention takes ten seconds of a core, and one serves all but the first.
    "flex": CheckedKernel(
        backend="performer-positive",
        note="flex",
        lengths=(1, 63, 65, 127, 129, 1000),
        bits={name: _BITS[name] for name in ("bfloat16", "float16")},
    ),
    "window-flex": _scores(backend="window", lengths=(129, 300, 1000), options={"window": 257}),
    "window-global": _scores(
        backend="window", lengths=(300, 1000), options={"window": 257, "global_tokens": 4}, trained=False
    ),
    "blocks-flex": _scores(
        backend="block-topk", lengths=(129, 300, 1000), options={"block": 32, "blocks": 3}, trained=False
    ),
}


def check_kernel(
    kernel: str | CheckedKernel,
    precision: str,
    *,
    device: str,
    tile: str = "",
    cases: Sequence[KernelCase] | None = None,
    features: int = 256,
) -> dict[str, Any]:
    """Counts of checked, served and failed cases, worst errors as shares of their bounds, and failures."""
    subject = SUBJECTS[kernel] if isinstance(kernel, str) else kernel
    # Tests pass subjects that are no kernels of a verdict.
    name = kernel if isinstance(kernel, str) else subject.note
    worst: dict[str, float] = {}
    failures: list[str] = []
    if cases is None:
        cases = cases_of(subject.lengths) + cases_of(subject.wide_lengths, head_dim=128)
    served = failed = 0
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        with verdict.on_trial({name: tile}):
            for case in cases:
                with observed_kernels() as names:
                    findings = list(_findings(subject, case, precision, device, features, names))
                served += bool(findings)
                for verb, share, text in findings:
                    worst[verb] = max(worst.get(verb, 0.0), share)
                    failures += [f"{case}, {verb}: {text}"] if text else []
                failed += any(text for *_, text in findings)
    finally:
        torch.set_float32_matmul_precision(before)
    return {
        "cases": len(cases),
        "served": served,
        "failed": failed,
        # JSON has no infinity.
        "worst": {verb: min(share, 1e9) for verb, share in worst.items()},
        "failures": failures[:_TOLD],
    }


def _results(call: Callable[[Inputs], Tensor], inputs: Inputs, gradient: Tensor | None) -> list[Tensor]:
    with torch.set_grad_enabled(gradient is not None):
        leaves = inputs.leaves()
        out = call(leaves)
    computed = [] if gradient is None else torch.autograd.grad(out, leaves[:3], gradient.to(out))
    return [out.detach(), *computed]


def _findings(
    subject: CheckedKernel, case: KernelCase, precision: str, device: str, features: int, names: set[str]
) -> Iterator[tuple[str, float, str]]:
    """Verb, largest share of its bound, and a failure or "". Nothing if none of `names` is the kernel."""
    dtype = torch.float32 if precision == "tf32" else getattr(torch, precision)
    backend = subject.build(case, precision, features)
    module = backend.to(device, dtype).eval()
    if subject.module is not None:
        module = subject.module(module)
    inputs, gradient = _draw(case, dtype, device)
    upstream = gradient if subject.trained else None
    try:
        results = []
        for _ in range(2 if case.tokens < _OFTEN_FROM else _OFTEN):
            poison(device)
            results.append(_results(partial(run, module), inputs, upstream))
        poison(device)
        parts = [tokens for tokens in (case.tokens // 3, case.tokens - case.tokens // 3) if tokens]
        with torch.no_grad():
            streamed = [decode(module, inputs, parts)[0]] if subject.streams else []
    except Exception as failure:  # A failing launch is a result of the check.
        yield "forward", float("inf"), described(failure)
        return
    if subject.note not in names:
        return
    exact, plain = _references(backend, inputs, gradient, precision, subject.bits[precision])
    labels = ("output", "gradient of q", "gradient of k", "gradient of v")
    for number, name in enumerate(labels[: len(results[0])]):
        verb = "backward" if number else "forward"
        scale = exact[number].norm()
        # With one visible key, gradients of q and k are zero up to rounding.
        scale = torch.maximum(scale, exact[-1].norm()) if number else scale
        sides = plain[number], exact[number], scale, subject.bits[precision]
        share, text = _compared(results[0][number], *sides, backward=bool(number))
        first, *later = (result[number].nan_to_num(7e4) for result in results)
        if not text and not all(torch.equal(first, again) for again in later):
            text = f"some of {len(later)} calls differ from the first in their bits"
        yield verb, share, text and f"{name}: {text}"
        for out in streamed if not number else []:
            yield "extend", *_compared(out, *sides, backward=False)


def _draw(case: KernelCase, dtype: torch.dtype, device: str) -> tuple[Inputs, Tensor]:
    """Inputs with rows of q and k of one norm after scaling, NaN in masked keys, and an upstream gradient."""
    generator = torch.Generator().manual_seed(case.tokens)
    batch = _BATCH if case.tokens <= _LONGEST_BATCH else 1
    heads = (_HEADS, *[_KV_HEADS if case.grouped else _HEADS] * 2, _HEADS)
    rows = (case.tokens, case.head_dim)
    q, k, v, gradient = (torch.randn(batch, h, *rows, generator=generator) for h in heads)
    q, k = (x / x.norm(dim=-1, keepdim=True) * case.norm * case.head_dim**0.25 for x in (q, k))
    # The weight of a key depends on its norm.
    k = k * (0.7 + 0.3 * torch.rand(*k.shape[:3], 1, generator=generator))
    mask = None
    if case.masked:
        mask = torch.rand(batch, case.tokens, generator=generator) < 0.7
        mask[0, : min(70, case.tokens // 3)] = False
        mask[:, 63::64] = False
        mask[:, -1] = True
        mask = mask.to(device)
    q, k, v, gradient = (x.to(device, dtype) for x in (q, k, v, gradient))
    inputs = Inputs(q, k, v, mask)
    return inputs.padded(torch.nan) if case.masked else inputs, gradient


def poison(device: str) -> None:
    """Fill free memory of the allocator with NaN, to expose kernels that read before they write."""
    if not device.startswith("cuda"):
        return
    # The allocator has a pool of small blocks and one of large ones.
    blocks = [torch.empty(size, device=device) for size in (*[2**17] * 16, *[2**24] * 8)]
    for block in blocks:
        block.fill_(torch.nan)


def _references(
    backend: Any, inputs: Inputs, gradient: Tensor, precision: str, bits: int | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients in float64, and by the yardstick of errors."""
    dtype = inputs.q.dtype

    def formula(bits: int | None) -> list[Tensor]:
        call = partial(_formula, backend, bits=bits, precision=precision, dtype=dtype)
        return _results(call, inputs.double(), gradient)

    exact = formula(None)
    if bits is not None:
        return exact, [x.to(dtype).double() for x in formula(bits)]
    plain = _results(partial(run, backend.cpu().float()), inputs.each(Tensor.cpu), gradient)
    return exact, [x.to(exact[0]) for x in plain]


def _compared(
    actual: Tensor, plain: Tensor, exact: Tensor, scale: Tensor, bits: int | None, *, backward: bool
) -> tuple[float, str]:
    """Largest error as a share of its bound, over all rows and per row, and a failure if above 1."""
    if not actual.isfinite().all():
        return float("inf"), "not finite"
    error, row = _errors(plain, exact, scale)
    eps, floor = 0.0, _FLOAT32
    if bits is not None:
        # By chance the rounding of few rows may be unusually small.
        eps = 2.0 ** -abs(bits)
        floor = eps * (2 if backward else 0.25) / exact.shape[2] ** 0.5
    factor = _FACTOR_OF_GRADIENTS if backward else _FACTOR
    bounds = factor * error + floor, _FACTOR_OF_ROWS * (row + floor) + eps
    errors = _errors(actual.double(), exact, scale)
    share = max(error / bound for error, bound in zip(errors, bounds, strict=True))
    return share, "" if share <= 1 else f"error {share:.2g} times its bound"


def _errors(actual: Tensor, exact: Tensor, scale: Tensor) -> tuple[float, float]:
    """Norm of the error over `scale`, and that of the worst row over the root mean square of rows."""
    rows = (actual - exact).norm(dim=-1)
    unit = scale.clamp_min(torch.finfo(torch.float64).tiny)
    return float(rows.norm() / unit), float(rows.max() * rows.numel() ** 0.5 / unit)


def _formula(backend: Any, inputs: Inputs, *, bits: int | None, precision: str, dtype: torch.dtype) -> Tensor:
    """The attention in float64, with operands of products rounded to `bits`."""
    # Queries, keys and directions in half precision are numbers of that precision already.
    outer = bits if precision == "tf32" else None
    q, k, v, mask = inputs
    k, v = (naive.for_query_heads(naive.masked_to_zero(x, mask), q) for x in (k, v))
    window, causal = getattr(backend.options, "window", None), backend.problem.causal
    count, block = (getattr(backend.options, name, 0) for name in ("global_tokens", "block"))
    visible = naive.visible_keys(q, k, causal=causal, key_mask=mask, window=window, global_tokens=count)
    factor = backend.problem.factor
    if block:
        # The backend's own choice: rounding of TF32 decides near ties of blocks.
        visible = backend.keys_read(inputs.q.to(dtype), inputs.k.to(dtype), key_mask=mask)
    mean = partial(_mean, bits=bits, dtype=dtype)
    if window is not None or block:
        scores = (factor * _product(q, k.mT, outer)).masked_fill(~visible, -torch.inf)
        return mean((scores - _largest(scores)).exp(), v)
    w = backend.core.features.projection.to(q)
    w = w.expand(*q.shape[:2], *w.shape)
    queries = factor**0.5 * _product(q, w.mT, outer)
    keys = factor**0.5 * _product(k, w.mT, outer) - factor / 2 * k.square().sum(dim=-1, keepdim=True)
    if mask is not None:
        keys = keys.masked_fill(~mask[:, None, :, None], -torch.inf)
    if not causal:
        means = _product(keys.softmax(dim=-2).mT, v, bits)
        scores = queries + keys.logsumexp(dim=-2, keepdim=True)
        return mean((scores - _largest(scores)).exp(), means)
    # In float64 no exponent of a norm up to 20 leaves the range.
    largest = keys.detach().amax(dim=-2, keepdim=True)
    rows = (queries + largest - _largest(queries + largest)).exp()
    return mean(_product(rows, (keys - largest).exp().mT, bits).masked_fill(~visible, 0.0), v)


def _mean(weights: Tensor, values: Tensor, *, bits: int | None, dtype: torch.dtype) -> Tensor:
    sums = weights.sum(dim=-1, keepdim=True)
    sums = sums.masked_fill(sums == 0, 1.0)
    out = _product(weights / sums, values, bits)
    if bits is None:
        return out
    # Kernels subtract the product of the output, as stored, and its gradient from the gradients of weights.
    stored, logarithms = out.detach().to(dtype).double(), sums.log()
    return out - (stored - out.detach()) * (logarithms - logarithms.detach())


def _largest(scores: Tensor) -> Tensor:
    largest = scores.detach().amax(dim=-1, keepdim=True)
    return largest.masked_fill(largest == -torch.inf, 0.0)


class _Product(torch.autograd.Function):
    """Matrix product of operands rounded to some mantissa bits, if any, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, bits: int | None) -> Tensor:
        x, y = _rounded(x, bits), _rounded(y, bits)
        ctx.save_for_backward(x, y)
        ctx.bits = bits
        return x @ y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y = ctx.saved_tensors
        gradient = _rounded(gradient, ctx.bits)
        return gradient @ y.mT, x.mT @ gradient, None


_product = _Product.apply


def _rounded(x: Tensor, bits: int | None) -> Tensor:
    """Round float64 numbers to `bits` mantissa bits at any exponent. Negative `bits` truncate."""
    if bits is None:
        return x
    dropped = 52 - abs(bits)
    half = 1 << (dropped - 1) if bits > 0 else 0
    return ((x.contiguous().view(torch.int64) + half) & -(1 << dropped)).view(torch.float64)
