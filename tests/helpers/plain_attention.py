"""Plain attention of every backend: all weights materialised, every operation in the dtype of q.

Errors of a kernel are held against errors of these formulas in the same dtype on the same device, at most
twice as large, the rule of FlashAttention's tests. References are backends in float64 on the CPU.
"""

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from unittest.mock import patch

import torch
from reference import random_mask, relative_error
from torch import Tensor

import efficient_attn as ea
from efficient_attn.backends.linear_attention import LinearAttention
from efficient_attn.ops import naive, paths

_ALL = slice(None)
# Magnitude of the logarithm of a row's sum: 2¹⁰ tokens, and a largest weight of e⁹.
_LOGARITHM = 16
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a call; lengths are no multiple of a block."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    tokens: int
    # √scale is a power of two: scaled queries and keys are as short in binary as their inputs.
    head_dim: int
    num_features: int
    window: int
    rank: int

    def options(self, name: str) -> dict[str, int]:
        """The size of a backend."""
        option = "rank" if name == "nystrom" else ea.spec(name).size_option
        return {ea.spec(name).size_option: vars(self)[option]} if option in vars(self) else {}


SMALL = Sizes(tokens=70, head_dim=16, num_features=32, window=9, rank=8)
LARGE = Sizes(batch=1, tokens=517, head_dim=64, num_features=256, window=129, rank=128)


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A backend, inputs in a dtype, and the same backend in float64, on the device and on the CPU."""

    name: str
    causal: bool
    backend: ea.Backend
    inputs: tuple[Tensor, Tensor, Tensor]
    key_mask: Tensor | None
    wide: ea.Backend
    reference: ea.Backend

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The tested call."""
        return self.backend(q, k, v, key_mask=self.key_mask)

    @property
    def wide_inputs(self) -> tuple[Tensor, ...]:
        """Inputs in float64."""
        return tuple(x.double() for x in self.inputs)

    def exact(self) -> list[Tensor]:
        """Output and gradients in float64 by the algorithms for the CPU."""
        mask = None if self.key_mask is None else self.key_mask.cpu()
        with patch.dict(os.environ, {paths.VARIABLE: ""}):
            inputs = tuple(x.cpu() for x in self.wide_inputs)
            return list(results(partial(self.reference, key_mask=mask), inputs))

    def plain(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The formula in the dtype of q; softmax attention for mixtures and clusters of keys."""
        core = (self.wide if q.dtype is torch.float64 else self.backend).core
        if self.name == "nystrom":
            mask = None if self.key_mask is None else self.key_mask.to(q.device)
            scale = self.backend.problem.factor
            return naive.nystrom(q, k, v, scale=scale, key_mask=mask, **vars(self.backend.options))
        visible = self.visible(q, k)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        if not isinstance(core, LinearAttention):
            scores = (q @ k.mT * self.backend.problem.factor).masked_fill(~visible, -torch.inf)
            return scores.softmax(dim=-1).nan_to_num(0.0) @ v
        weights = linear_weights(core, q, k).masked_fill(~visible, 0.0)
        sums = weights.sum(dim=-1, keepdim=True)
        return torch.where(sums == 0, 0.0, weights @ v / sums.where(sums != 0, 1.0))

    @property
    def written_out(self) -> bool:
        """Whether `plain` is the formula of the backend."""
        return self.name not in ("linformer", "window-clusters")

    def visible(self, q: Tensor, k: Tensor) -> Tensor:
        """True where a query reads a key, [batch heads or 1, q_tokens k_tokens]."""
        mask = None if self.key_mask is None else self.key_mask.to(q.device)
        if self.name in ("bigbird", "block-topk", "oracle-topk"):
            return self.backend.keys_read(q, k, key_mask=mask)
        window = self.backend.options.window if self.name == "window" else None
        return naive.visible_keys(q, k, causal=self.causal, key_mask=mask, window=window)


def linear_weights(core: LinearAttention, q: Tensor, k: Tensor) -> Tensor:
    """φ(q)·φ(k), each row and all keys of a head by their largest scale, [batch heads q_tokens k_tokens]."""
    inputs = core.inputs(q, k, k, None)
    x, y = (rows.to(q.dtype) for rows in (inputs.query_rows(_ALL), inputs.key_rows(_ALL)))
    directions = None if inputs.directions is None else inputs.directions.to(q.dtype)
    queries, keys = (inputs.map.features(rows, directions) for rows in (x, y))
    scale = keys.log_scale
    if inputs.log_weights is not None:
        scale = scale + inputs.log_weights.to(q.dtype)
    largest = scale.detach().amax(dim=-2, keepdim=True)
    shift = (queries.log_scale + largest).detach().amax(dim=-1, keepdim=True)
    left, right = (queries.log_scale + largest - shift).exp(), (scale - largest).exp()
    if queries.values is not None and keys.values is not None:
        left, right = queries.values * left, keys.values * right
    return left @ right.mT


@cache
def problem(
    name: str, dtype: torch.dtype, device: str, sizes: Sizes, *, causal: bool, grouped: bool = False
) -> Problem:
    """A backend and Gaussian inputs; `grouped` ones have fewer key heads, other lengths and a key mask.

    Parameters and random features are rounded to `dtype` once: a rounded draw is a draw like another.
    """
    shared = {"head_dim": sizes.head_dim, "num_heads": sizes.heads, "max_tokens": sizes.tokens}
    backend = ea.build(name, causal=causal, scale=1 / 16, **shared, **sizes.options(name))
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, tokens: int) -> Tensor:
        x = torch.randn(sizes.batch, heads, tokens, sizes.head_dim, generator=generator)
        # Rows of signed features whose weights nearly cancel would magnify rounding without bound.
        return (x / 2 if signed else x).to(dtype)

    signed = not ea.spec(name).capabilities.nonnegative
    kv_heads = sizes.kv_heads if grouped else sizes.heads
    queries = sizes.tokens - 7 if grouped and ea.spec(name).capabilities.cross else sizes.tokens
    q, k, v = draw(sizes.heads, queries), draw(kv_heads, sizes.tokens), draw(kv_heads, sizes.tokens)
    if backend.needs_calibration:
        backend.calibrate(q[..., :40, :].float(), k[..., :40, :].float())
    with torch.no_grad():
        for x in (*backend.parameters(), *backend.buffers()):
            if x.is_floating_point():
                x.copy_(x.to(dtype))
    return Problem(
        name=name,
        causal=causal,
        backend=copy.deepcopy(backend).to(device, dtype),
        inputs=(q.to(device), k.to(device), v.to(device)),
        key_mask=random_mask(sizes.batch, sizes.tokens).to(device) if grouped else None,
        wide=copy.deepcopy(backend).to(device, torch.float64),
        reference=backend.double(),
    )


def results(attend: Attend, inputs: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """Output and gradients with respect to q, k and v, for gradients of the output like the output's own."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = attend(*leaves)
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(out.shape, generator=generator).to(leaves[0].dtype).to(out)
    yield out.detach()
    yield from torch.autograd.grad(out, leaves, gradient)


def error(out: Tensor, reference: Tensor) -> float:
    """Norm of the error over that of the reference."""
    return relative_error(out.cpu(), reference.double().cpu())


@cache
def bounds(task: Problem) -> list[tuple[Tensor, float]]:
    """Reference and largest error of the output and of each gradient.

    Twice the plain error, one rounding of the result, and the rounding of the logarithm by which weights are
    normalised, which kernels keep for the backward pass in float32. Gradients of causal linear attention in
    float16 may err four times as much: operands of its kernels on CUDA are bfloat16, whose range they need.
    """
    linear = isinstance(task.backend.core, LinearAttention) and task.causal
    factor = 4 if linear and task.inputs[0].is_cuda and task.inputs[0].dtype is torch.float16 else 2
    plain, plain_exact = (results(task.plain, inputs) for inputs in (task.inputs, task.wide_inputs))
    eps = torch.finfo(task.inputs[0].dtype).eps + _LOGARITHM * torch.finfo(torch.float32).eps / 2
    factors = (2, factor, factor, factor)
    rows = zip(task.exact(), factors, plain, plain_exact, strict=True)
    return [(expected, times * error(out, formula) + eps) for expected, times, out, formula in rows]
