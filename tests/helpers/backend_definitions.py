"""Output of a backend by its definition in `efficient_attn.ops.naive`, with the parameters that it holds."""

import math
from functools import partial

import torch
from torch import Tensor

import efficient_attn as ea
from efficient_attn.ops import naive
from efficient_attn.ops.blocks import Blocks


def by_definition(
    backend: ea.Backend, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None
) -> Tensor:
    """Output of any backend but those of clusters and of chosen blocks, differentiable in all tensors."""
    name, problem, core = backend.spec.name, backend.problem, backend.core
    masked = {"scale": problem.factor, "key_mask": key_mask}
    if name == "linformer":
        mixing = {"mix_keys": core.mix_keys, "mix_values": core.mix_values}
        return naive.linformer(q, k, v, **mixing, **masked)
    if name == "nystrom":
        return naive.nystrom(q, k, v, **masked, **vars(backend.options))
    masked["causal"] = problem.causal
    if name in ("exact", "exact-dense"):
        return naive.softmax_attention(q, k, v, **masked)
    if name == "window":
        sizes = {"window": backend.options.window, "global_tokens": backend.options.global_tokens}
        return naive.softmax_attention(q, k, v, **masked, **sizes)
    if name == "oracle-topk":
        read = naive.top_keys(q, k, keys=backend.options.keys, **masked)
        return naive.softmax_over(q, k, v, read, scale=problem.factor, key_mask=key_mask)
    if name == "bigbird":
        return bigbird(backend, q, k, v, key_mask)
    if name in ("performer-oprf", "performer-full"):
        return dense_exponential(core.features, q, k, v, **masked)
    if name == "linear-hedgehog":
        return hedgehog(core.features, q, k, v, **masked)
    if name in FIXED:
        return naive.linear_attention(q, k, v, FIXED[name], **masked)
    features = partial(RANDOM[name], w=core.features.projection.double())
    return naive.linear_attention(q, k, v, features, **masked)


RANDOM = {
    "performer-positive": naive.positive_features,
    "performer-hyperbolic": naive.hyperbolic_features,
    "performer-trig": naive.trigonometric_features,
    "linear-relu": naive.relu_features,
}
FIXED = {
    "linear-elu": naive.elu_features,
    "linear-taylor-1": partial(naive.taylor_features, order=1),
    "linear-taylor-2": partial(naive.taylor_features, order=2),
}


def transformed(fit, q, k, head, *, scale):
    """x' and y' of a key head and its query heads, whose products differ from scale · q·k by row only."""
    queries, keys = math.copysign(1.0, scale) * q.chunk(k.shape[1], dim=1)[head], k[:, head : head + 1]
    queries, keys = (abs(scale) ** 0.5 * x for x in (queries, keys))
    if len(fit.shift):
        queries = queries @ fit.query_transform[head].mT
        keys = (keys - fit.shift[head]) @ fit.key_transform[head].mT
    return queries, keys


def dense_exponential(fit, q, k, v, *, scale, **options):
    """Each key head has parameters of its own, and transforms of queries and keys if they were fitted."""
    outs = []
    for head, values in enumerate(v.split(1, dim=1)):
        curvatures = fit.curvatures[head % len(fit.curvatures)].double()
        w = fit.random.projection.double()
        features = partial(naive.dense_exponential_features, w=w, a=curvatures)
        inputs = transformed(fit, q, k, head, scale=scale)
        outs.append(naive.linear_attention(*inputs, values, features, scale=1.0, **options))
    return torch.cat(outs, dim=1)


def hedgehog(maps, q, k, v, **options):
    """Each query head has maps of its own, or all heads have the same."""
    k, v = (naive.for_query_heads(x, q) for x in (k, v))
    outs = []
    for head in range(q.shape[1]):
        index = head if len(maps.query_weight) > 1 else 0
        sides = ((maps.query_weight, maps.query_bias), (maps.key_weight, maps.key_bias))
        of_queries, of_keys = (
            partial(naive.hedgehog_features, weight=weight[index], bias=bias[index, 0])
            for weight, bias in sides
        )
        one_head = (x[:, head : head + 1] for x in (q, k, v))
        outs.append(naive.linear_attention(*one_head, of_queries, key_features=of_keys, **options))
    return torch.cat(outs, dim=1)


def bigbird(backend, q, k, v, key_mask):
    """The random blocks are those that the backend draws; tests/ops/test_blocks.py looks at the draw."""
    options, causal = backend.options, backend.problem.causal
    sizes = {"block": options.block, "window": options.window, "global_blocks": options.global_blocks}
    real = k.new_ones(len(k), k.shape[2], dtype=torch.bool) if key_mask is None else key_mask
    first = real.long().argmax(dim=1, keepdim=True)
    last = (torch.arange(1, k.shape[2] + 1) * real).amax(dim=1, keepdim=True)
    total = -(-k.shape[2] // options.block)
    real_blocks = -(-(last - first).clamp_min(0)[..., None] // options.block)
    numbers = backend.core.pattern.choose(Blocks(torch.arange(total), real_blocks, total)).clamp_max(total)
    drawn = torch.zeros(*numbers.shape[:3], total + 1, dtype=torch.bool).scatter_(3, numbers, True)
    read = naive.bigbird_keys(k, drawn=drawn[..., :total], causal=causal, key_mask=key_mask, **sizes)
    return naive.softmax_over(q, k, v, read, scale=backend.problem.factor, key_mask=key_mask)
