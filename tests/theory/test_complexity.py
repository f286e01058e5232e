"""What calls are said to cost, held against torch's own counter of the operations of matrix products."""

from collections.abc import Callable

import pytest
import torch
from reference import random_qkv
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import efficient_attn as ea
from efficient_attn.errors import OptionError
from efficient_attn.ops.linear import causal_exponential, scaled_chunks
from efficient_attn.problem import AttentionProblem
from efficient_attn.theory.complexity import Cost, call_cost

BATCH, HEADS, KV_HEADS, TOKENS, HEAD_DIM, VALUE_DIM = 2, 4, 2, 13, 8, 5
# Of each backend options small enough for the sizes above.
OPTIONS = {
    "exact": {},
    "exact-dense": {},
    "window": {"window": 5},
    "window-clusters": {"window": 4, "clusters": 3},
    "linformer": {"rank": 6},
    "nystrom": {"landmarks": 6},
    "oracle-topk": {"keys": 3},
    "bigbird": {"block": 2, "random_blocks": 0},
    "block-topk": {"block": 2, "blocks": 1},
    "performer-positive": {"num_features": 6},
    "performer-trig": {"num_features": 6},
    "performer-hyperbolic": {"num_features": 6},
}
PERFORMERS = ("performer-positive", "performer-trig", "performer-hyperbolic")


def cost(
    name: str, *, value_dim: int = VALUE_DIM, causal: bool = False, backward: bool = False, **options: object
) -> Cost:
    spec = ea.spec(name)
    problem = AttentionProblem(head_dim=HEAD_DIM, num_heads=HEADS, max_tokens=TOKENS, causal=causal)
    chosen = spec.options_type(**(OPTIONS[name] | options))
    sizes = {"batch": BATCH, "num_kv_heads": KV_HEADS, "value_dim": value_dim}
    return call_cost(spec, problem, chosen, TOKENS, **sizes, backward=backward)


def tensors(value_dim: int = VALUE_DIM) -> tuple[Tensor, ...]:
    qkv = random_qkv(BATCH, HEADS, KV_HEADS, TOKENS, TOKENS, HEAD_DIM, value_dim)
    return tuple(x.float() for x in qkv)


def counted(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def counted_passes(attention: Callable[..., Tensor], *, backward: bool, value_dim: int = VALUE_DIM) -> int:
    """What torch counts of an attention, with the gradients of all that has one."""
    q, k, v = (x.requires_grad_(backward) for x in tensors(value_dim))

    def call() -> None:
        # The sum's own derivative is no product.
        out = attention(q, k, v)
        if backward:
            out.sum().backward()

    # The fused kernel of the CPU is not counted; this one is made of products.
    with sdpa_kernel(SDPBackend.MATH):
        return counted(call)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [("exact", {}), ("exact-dense", {}), ("nystrom", {})]
    + [("linformer", {"sharing": sharing}) for sharing in ("heads", "none", "key-value")],
)
def test_attention_made_of_products_does_what_torch_counts(name, options, backward) -> None:
    built = ea.build(name, head_dim=HEAD_DIM, num_heads=HEADS, max_tokens=TOKENS, **(OPTIONS[name] | options))
    # The fused kernel takes values as wide as keys, and others with zeros up to that.
    shared = {"backward": backward, "value_dim": HEAD_DIM if name != "exact-dense" else VALUE_DIM}
    assert cost(name, **shared, **options).flops == counted_passes(built, **shared)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("name", "causal", "visible"),
    [
        ("exact", True, lambda i, j: j <= i),
        ("exact-dense", True, lambda i, j: j <= i),
        ("window", False, lambda i, j: abs(i - j) <= 2),
        ("window", True, lambda i, j: i - 5 < j <= i),
        ("bigbird", True, lambda i, j: j <= i and (i // 2 - j // 2 < 3 or j < 2)),
    ],
)
def test_what_a_mask_throws_away_is_not_counted(name, causal, visible, backward) -> None:
    def row_by_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
        rows = []
        for i in range(TOKENS):
            read = [j for j in range(TOKENS) if visible(i, j)]
            rows.append((q[:, :, i : i + 1] @ k[:, :, read].mT).softmax(-1) @ v[:, :, read])
        return torch.cat(rows, dim=2)

    assert cost(name, causal=causal, backward=backward).flops == counted_passes(row_by_row, backward=backward)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", PERFORMERS)
def test_linear_attention_adds_the_pairs_within_a_chunk_if_causal(
    name, causal, backward, monkeypatch
) -> None:
    for module in (scaled_chunks, causal_exponential):
        monkeypatch.setattr(module, "CHUNK", 4)
    backend = ea.build(name, head_dim=HEAD_DIM, num_heads=HEADS, **OPTIONS[name])
    directions = backend.core.inputs(*tensors(), None).directions
    repeats = OPTIONS[name]["num_features"] // len(directions)

    def features(x: Tensor) -> Tensor:
        return (x @ directions.mT).repeat(1, 1, 1, repeats)

    def chunk_by_chunk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The column of denominators is apart, since ones have no gradient."""
        rows, sums, ones = [], 0.0, torch.ones(BATCH, KV_HEADS, TOKENS, 1)
        per_key_head, chunk = HEADS // KV_HEADS, 4 if causal else TOKENS
        for start in range(0, TOKENS, chunk):
            part = slice(start, start + chunk)
            of_q, of_k = features(q[:, :, part]), features(k[:, :, part])
            sums = sums + torch.cat([of_k.mT @ x[:, :, part] for x in (v, ones)], dim=-1)
            rows.append((of_q @ sums.repeat_interleave(per_key_head, dim=1)).sum(-1))
            keys, *values = (
                x.repeat_interleave(per_key_head, dim=1) for x in (of_k, v[:, :, part], ones[:, :, part])
            )
            for i in range(keys.shape[2] if causal else 0):
                scores = of_q[:, :, i : i + 1] @ keys[:, :, : i + 1].mT
                rows += [(scores @ x[:, :, : i + 1]).sum(-1) for x in values]
        return torch.cat(rows, dim=-1)

    expected = counted_passes(chunk_by_chunk, backward=backward)
    assert cost(name, causal=causal, backward=backward).flops == expected


def test_exponentials_are_one_for_a_pair_or_one_for_a_feature() -> None:
    pairs, features = BATCH * HEADS * TOKENS**2, BATCH * (HEADS + KV_HEADS) * TOKENS * 6
    assert cost("exact").exponentials == pairs
    assert cost("exact", causal=True).exponentials == BATCH * HEADS * TOKENS * (TOKENS + 1) // 2
    assert cost("linformer").exponentials == BATCH * HEADS * TOKENS * 6
    assert [cost(name).exponentials for name in PERFORMERS] == [features] * 3


@pytest.mark.parametrize("name", OPTIONS)
def test_bytes_are_those_of_inputs_output_parameters_and_their_gradients(name) -> None:
    built = ea.build(name, head_dim=HEAD_DIM, num_heads=HEADS, max_tokens=TOKENS, **OPTIONS[name])
    q, k, v = tensors()
    moving = [q, k, v, built(q, k, v), *built.parameters()]
    forward, drawn = sum(x.nbytes for x in moving), sum(x.nbytes for x in built.buffers())
    assert cost(name).moved_bytes == forward + drawn
    assert cost(name, backward=True).moved_bytes == 2 * forward + drawn


def test_kept_bytes_are_scores_mixtures_or_the_state_that_is_carried_on() -> None:
    assert cost("exact").kept_bytes == 0
    assert cost("exact-dense").kept_bytes == 4 * BATCH * HEADS * TOKENS**2
    assert cost("linformer").kept_bytes == 4 * BATCH * KV_HEADS * 6 * (HEAD_DIM + VALUE_DIM)
    for name in PERFORMERS:
        # Sums of features with the entries of values, and with ones.
        assert cost(name).kept_bytes == 4 * BATCH * KV_HEADS * 6 * (VALUE_DIM + 1)


def test_what_nobody_counted_is_unknown_and_what_cannot_be_counted_is_refused() -> None:
    def mean(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v.mean(dim=2, keepdim=True).expand(q.shape)

    spec = ea.build(mean, head_dim=HEAD_DIM).spec
    problem = AttentionProblem(head_dim=HEAD_DIM)
    assert call_cost(spec, problem, None, TOKENS) is None
    exact = ea.spec("exact")
    with pytest.raises(OptionError, match="num_heads: give the problem one"):
        call_cost(exact, problem, exact.options_type(), TOKENS)
