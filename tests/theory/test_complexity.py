"""What calls are said to cost, held against torch's own counter of the operations of matrix products."""

import pytest
import torch
from reference import random_qkv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import efficient_attn as ea
from efficient_attn.ops.linear import causal_exponential, scaled_chunks
from efficient_attn.problem import AttentionProblem
from efficient_attn.theory.complexity import call_flops, fewer_products_from

BATCH, HEADS, KV_HEADS, TOKENS, HEAD_DIM, VALUE_DIM = 2, 4, 2, 13, 8, 5
PERFORMERS = ("performer-positive", "performer-trig", "performer-hyperbolic")
# Of each backend options small enough for the sizes above.
OPTIONS = {
    **{"exact": {}, "exact-dense": {}, "window": {"window": 5}, "linformer": {"rank": 6}},
    **{"window-clusters": {"window": 4, "clusters": 3}, "nystrom": {"landmarks": 6}},
    **{"bigbird": {"block": 2, "random_blocks": 0}, "block-topk": {"block": 2, "blocks": 1}},
    **{"oracle-topk": {"keys": 3}, **{name: {"num_features": 6} for name in PERFORMERS}},
}
BOTH = pytest.mark.parametrize("backward", [False, True])


def flops(name, *, value_dim=VALUE_DIM, causal=False, backward=False, **options):
    spec = ea.spec(name)
    problem = AttentionProblem(head_dim=HEAD_DIM, num_heads=HEADS, max_tokens=TOKENS, causal=causal)
    chosen = spec.options_type(**(OPTIONS[name] | options))
    sizes = {"batch": BATCH, "num_kv_heads": KV_HEADS, "value_dim": value_dim}
    return call_flops(spec, problem, chosen, TOKENS, **sizes, backward=backward)


def built(name, **options):
    sizes = {"head_dim": HEAD_DIM, "num_heads": HEADS, "max_tokens": TOKENS}
    return ea.build(name, **sizes, **(OPTIONS[name] | options))


def tensors(value_dim=VALUE_DIM):
    return [x.float() for x in random_qkv(BATCH, HEADS, KV_HEADS, TOKENS, TOKENS, HEAD_DIM, value_dim)]


def counted(attention, *, backward, value_dim=VALUE_DIM):
    """What torch counts of an attention, with the gradients of all that has one."""
    inputs = [x.requires_grad_(backward) for x in tensors(value_dim)]
    # The fused kernel of the CPU is not counted; this one is made of products.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        # The sum's own derivative is no product.
        out = attention(*inputs).sum()
        if backward:
            out.backward()
    return counter.get_total_flops()


@BOTH
@pytest.mark.parametrize(
    ("name", "options"),
    [("exact", {}), ("exact-dense", {}), ("nystrom", {})]
    + [("linformer", {"sharing": sharing}) for sharing in ("heads", "none", "key-value")],
)
def test_attention_made_of_products_does_what_torch_counts(name, options, backward):
    # The fused kernel takes values as wide as keys, and others with zeros up to that.
    shared = {"backward": backward, "value_dim": HEAD_DIM if name != "exact-dense" else VALUE_DIM}
    assert flops(name, **shared, **options) == counted(built(name, **options), **shared)


@BOTH
@pytest.mark.parametrize(
    ("name", "options", "causal", "visible"),
    [
        ("exact", {}, True, lambda i, j: j <= i),
        ("exact-dense", {}, True, lambda i, j: j <= i),
        ("window", {}, False, lambda i, j: abs(i - j) <= 2),
        ("window", {}, True, lambda i, j: i - 5 < j <= i),
        ("window", {"global_tokens": 4}, False, lambda i, j: abs(i - j) <= 2 or j < 4),
        ("window", {"global_tokens": 4}, True, lambda i, j: j <= i and (i - 5 < j or j < 4)),
        ("bigbird", {}, True, lambda i, j: j <= i and (i // 2 - j // 2 < 3 or j < 2)),
    ],
)
def test_what_a_mask_throws_away_is_not_counted(name, options, causal, visible, backward):
    def row_by_row(q, k, v):
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
        rows = []
        for i in range(TOKENS):
            read = [j for j in range(TOKENS) if visible(i, j)]
            rows.append((q[:, :, i : i + 1] @ k[:, :, read].mT).softmax(-1) @ v[:, :, read])
        return torch.cat(rows, dim=2)

    expected = counted(row_by_row, backward=backward)
    assert flops(name, causal=causal, backward=backward, **options) == expected


@BOTH
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", PERFORMERS)
def test_linear_attention_adds_the_pairs_within_a_chunk_if_causal(name, causal, backward, monkeypatch):
    for module in (scaled_chunks, causal_exponential):
        monkeypatch.setattr(module, "CHUNK", 4)
    features_of_a_direction = 1 if name == "performer-positive" else 2
    directions = torch.randn(6 // features_of_a_direction, HEAD_DIM)

    def features(x):
        return (x @ directions.mT).repeat(1, 1, 1, features_of_a_direction)

    def chunk_by_chunk(q, k, v):
        """The column of denominators is apart, since ones have no gradient."""
        rows, sums, ones = [], 0.0, torch.ones(BATCH, KV_HEADS, TOKENS, 1)
        per_key_head, chunk = HEADS // KV_HEADS, 4 if causal else TOKENS
        for start in range(0, TOKENS, chunk):
            part = slice(start, start + chunk)
            of_q, of_k = features(q[:, :, part]), features(k[:, :, part])
            sums = sums + torch.cat([of_k.mT @ x[:, :, part] for x in (v, ones)], dim=-1)
            rows.append((of_q @ sums.repeat_interleave(per_key_head, dim=1)).sum(-1))
            read = (of_k, v[:, :, part], ones[:, :, part])
            keys, *values = (x.repeat_interleave(per_key_head, dim=1) for x in read)
            for i in range(keys.shape[2] if causal else 0):
                scores = of_q[:, :, i : i + 1] @ keys[:, :, : i + 1].mT
                rows += [(scores @ x[:, :, : i + 1]).sum(-1) for x in values]
        return torch.cat(rows, dim=-1)

    expected = counted(chunk_by_chunk, backward=backward)
    assert flops(name, causal=causal, backward=backward) == expected


def test_what_nobody_counted_is_unknown_and_what_cannot_be_counted_is_refused():
    problem, exact = AttentionProblem(head_dim=HEAD_DIM), ea.spec("exact")
    assert call_flops(ea.build(lambda q, k, v: v, head_dim=HEAD_DIM).spec, problem, None, TOKENS) is None
    with pytest.raises(ea.OptionError, match="num_heads: give the problem one"):
        call_flops(exact, problem, exact.options_type(), TOKENS)


def test_fewer_products_than_exact_attention_are_counted():
    exact = ea.spec("exact")
    # 2145 features, each in 64 + 1 sums of keys and as many of a query; exact has 2 · 64 n products.
    assert fewer_products_from(ea.spec("linear-taylor-2"), exact) == 2145 * 2 * 65 // (2 * 64) + 1
    # A window reads 257 keys but for the 128 · 129 that the first and last queries lack.
    window = fewer_products_from(ea.spec("window"), exact, head_dim=8)
    assert window == min(n for n in range(1, 999) if 257 * n - 128 * 129 < n * n and n > 257 // 2 + 1)
    assert fewer_products_from(exact, exact) is None
    assert fewer_products_from(ea.spec("by-head"), exact) is None
