"""Slow, obvious definitions in float64, written without looking at the package's formulas."""

import math

import torch
from torch import Tensor


def reference_attention(q, k, v, *, scale, visible=None, causal=False, key_mask=None) -> Tensor:
    """Softmax attention, one query at a time; `visible(i, j)` says whether position i may read j."""
    q, k, v = (x.detach().double() for x in (q, k, v))
    batch, heads, queries, _ = q.shape
    out = torch.zeros(batch, heads, queries, v.shape[-1], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            head = h * k.shape[1] // heads
            for i in range(queries):
                read = readable(i, queries, k.shape[2], b, visible, causal, key_mask)
                if not read:
                    continue
                scores = scale * (k[b, head, read] @ q[b, h, i])
                weights = (scores - scores.max()).exp()
                out[b, h, i] = weights @ v[b, head, read] / weights.sum()
    return out


def readable(i, queries, keys, b, visible, causal, key_mask) -> list[int]:
    """Positions of the keys that query i reads; queries are the last positions of the keys."""
    position = i + keys - queries if causal else i
    return [
        j
        for j in range(keys)
        if (not causal or j <= position)
        and (visible is None or visible(position, j))
        and (key_mask is None or bool(key_mask[b, j]))
    ]


def reference_kernel(x: Tensor, keys: Tensor, directions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Logarithms and signs of φ(x)·φ(y) for the rows y of `keys`, all holding the scale already."""
    half = (x @ x + (keys * keys).sum(-1)) / 2
    if kind == "positive":
        exponents = (x + keys) @ directions.mT - half.unsqueeze(-1) - math.log(len(directions))
        return torch.logsumexp(exponents, -1), torch.ones_like(half)
    if kind == "hyperbolic":
        exponents = torch.cat([(x + keys) @ directions.mT, -(x + keys) @ directions.mT], -1)
        logarithm = torch.logsumexp(exponents, -1) - half - math.log(2 * len(directions))
        return logarithm, torch.ones_like(half)
    mean = torch.cos((x - keys) @ directions.mT).mean(-1)
    return half + mean.abs().log(), mean.sign()


def reference_linear(q, k, v, directions, kind, *, scale, causal=False, key_mask=None) -> Tensor:
    """Attention by an estimated kernel, weight by weight, in logarithms."""
    q, k, v, directions = (x.detach().double() for x in (q, k, v, directions))
    batch, heads, queries, _ = q.shape
    out = torch.zeros(batch, heads, queries, v.shape[-1], dtype=torch.float64)
    root = math.sqrt(scale)
    for b in range(batch):
        for h in range(heads):
            head = h * k.shape[1] // heads
            for i in range(queries):
                read = readable(i, queries, k.shape[2], b, None, causal, key_mask)
                if not read:
                    continue
                keys = k[b, head, read] * root
                logarithms, signs = reference_kernel(q[b, h, i] * root, keys, directions, kind)
                weights = signs * (logarithms - logarithms.max()).exp()
                out[b, h, i] = weights @ v[b, head, read] / weights.sum()
    return out


def reference_condition(q, k, directions, kind, *, scale, causal=False) -> Tensor:
    """Σ|weight| / |Σ weight| of every row, [batch heads q_tokens 1]: how much its rounding is magnified."""
    q, k, directions = (x.detach().double() for x in (q, k, directions))
    x, y = q * math.sqrt(scale), k.repeat_interleave(q.shape[1] // k.shape[1], 1) * math.sqrt(scale)
    if kind != "trigonometric":
        return torch.ones(*q.shape[:-1], 1, dtype=torch.float64)
    # The angles of cos(w·x) and sin(w·x) are rounded before they are compared.
    kernel = torch.cos((x.unsqueeze(-2) - y.unsqueeze(-3)) @ directions.mT).mean(-1)
    logarithms = (y * y).sum(-1).unsqueeze(-2) / 2
    seen = torch.ones(kernel.shape[-2:], dtype=torch.bool)
    seen = seen.tril(k.shape[2] - q.shape[2]) if causal else seen
    logarithms = logarithms.masked_fill(~seen, -torch.inf)
    scale_of_keys = (logarithms - logarithms.amax(-1, keepdim=True)).exp()
    # A feature's cosine is rounded to one part in 1 even where the kernel's mean of cosines is small.
    return scale_of_keys.sum(-1, keepdim=True) / (scale_of_keys * kernel).sum(-1, keepdim=True).abs()


def random_qkv(batch=2, heads=4, kv_heads=2, q_tokens=7, k_tokens=7, head_dim=8, value_dim=5, *, seed=0):
    """Gaussian queries, keys and values in float64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (heads, q_tokens, head_dim), (kv_heads, k_tokens, head_dim), (kv_heads, k_tokens, value_dim)
    return tuple(torch.randn(batch, *shape, generator=generator, dtype=torch.float64) for shape in shapes)


def random_mask(batch, tokens, *, seed=0) -> Tensor:
    """A key mask with real and masked tokens; the last batch entry begins with masked ones."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(batch, tokens, generator=generator) > 0.4
    mask[-1, : min(3, tokens)] = False
    return mask


def largest_difference(actual: Tensor, expected: Tensor, inputs=()) -> Tensor:
    """Largest difference of two outputs, and of their gradients by the inputs; NaN if there is one."""
    pairs = [(actual, expected)]
    if inputs:
        pairs += zip(*(torch.autograd.grad(x.sin().sum(), inputs) for x in (actual, expected)), strict=True)
    # Not the maximum of Python, which passes over NaN.
    return torch.stack([(x - y).detach().abs().max() for x, y in pairs]).max()


def output_and_gradients(call, inputs) -> list[Tensor]:
    """Output of a call, and the gradients of a scalar of it by all inputs."""
    out = call(*inputs)
    return [out, *torch.autograd.grad(out.sin().sum(), inputs)]


def assert_near(actual, expected, bound: float) -> None:
    """Every tensor differs by at most `bound` relative to the largest number of the expected one."""
    for x, y in zip(actual, expected, strict=True):
        assert (x - y).abs().max() <= bound * y.abs().max()


def first_and_second_derivatives(call, inputs) -> list[Tensor]:
    """Gradients of a scalar by all inputs, and the gradients of their squares."""
    first = torch.autograd.grad(call(*inputs).sin().sum(), inputs, create_graph=True)
    return [*first, *torch.autograd.grad(sum(x.square().sum() for x in first), inputs)]


def relative_error(out: Tensor, reference: Tensor) -> float:
    """‖out − reference‖ / ‖reference‖."""
    return float((out.double() - reference).norm() / reference.norm().clamp_min(1e-300))
