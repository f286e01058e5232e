"""What calls are said to cost, held against torch's own counter of the operations of matrix products."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import random_qkv
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import efficient_attn as ea
from efficient_attn.errors import OptionError
from efficient_attn.operation_counts import MatMul
from efficient_attn.ops.linear import causal_exponential, scaled_chunks
from efficient_attn.ops.linear import full as linear_full
from efficient_attn.ops.linear.features import MAPS
from efficient_attn.ops.linear.state import Means
from efficient_attn.problem import AttentionProblem
from efficient_attn.theory.complexity import Cost, block_flops, call_cost, matmul_flops

BATCH, HEADS, KV_HEADS, TOKENS, HEAD_DIM, VALUE_DIM = 2, 4, 2, 13, 8, 5
# Of each backend options small enough for the sizes above.
OPTIONS = {
    "exact": {},
    "exact-dense": {},
    "window": {"window": 5},
    "window-clusters": {"window": 4, "clusters": 3},
    "linformer": {"rank": 6},
    "performer-positive": {"num_features": 6},
    "performer-trig": {"num_features": 6},
    "performer-hyperbolic": {"num_features": 6},
}
# A transform of vectors is a product of head_dim², and some features are as many as entries or their pairs.
BEYOND_LINEAR = {"performer-full", "linear-elu", "linear-hedgehog", "linear-taylor-1", "linear-taylor-2"}
LINEAR_IN_HEAD_DIM = [n for n in ea.list_backends() if ea.spec(n).operations and n not in BEYOND_LINEAR]
PERFORMERS = ("performer-positive", "performer-trig", "performer-hyperbolic")


def cost(
    name: str, *, value_dim: int = VALUE_DIM, causal: bool = False, backward: bool = False, **options: object
) -> Cost:
    spec = ea.spec(name)
    problem = AttentionProblem(head_dim=HEAD_DIM, num_heads=HEADS, max_tokens=TOKENS, causal=causal)
    chosen = spec.options_type(**(OPTIONS[name] | options))
    sizes = {"batch": BATCH, "num_kv_heads": KV_HEADS, "value_dim": value_dim}
    found = call_cost(spec, problem, chosen, TOKENS, **sizes, backward=backward)
    assert found is not None
    return found


def tensors(value_dim: int = VALUE_DIM) -> tuple[Tensor, ...]:
    drawn = random_qkv(BATCH, HEADS, KV_HEADS, TOKENS, TOKENS, HEAD_DIM, value_dim)
    return tuple(x.float() for x in drawn)


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
    [("exact", {}), ("exact-dense", {})]
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


def inputs_of_the_operator(name: str, **built: object) -> tuple:
    backend = ea.build(name, head_dim=HEAD_DIM, num_heads=HEADS, **OPTIONS[name], **built)
    return tuple(backend.core.inputs(*tensors(), None))


@pytest.fixture
def as_any_map(monkeypatch):
    """Features without the shortcuts that some of them allow, which the counter cannot see into."""
    for kind, feature_map in MAPS.items():
        monkeypatch.setitem(MAPS, kind, feature_map._replace(exponential=False, trigonometric=False))


@pytest.mark.parametrize("name", PERFORMERS)
def test_the_linear_operator_does_what_is_counted_and_backward_makes_its_features_anew(
    name, as_any_map
) -> None:
    inputs = inputs_of_the_operator(name)
    *outputs, sums, reference = linear_full._full(*inputs)
    gradient = torch.ones_like(outputs[0])
    # Inside the operator the counter sees nothing; what it runs is a plain function.
    forward = counted(lambda: linear_full._full._init_fn(*inputs))
    backward = counted(
        lambda: linear_full._full_backward._init_fn(gradient, *outputs, sums, reference, *inputs)
    )
    directions = inputs[4].shape[0]
    anew = 2 * BATCH * (HEADS + KV_HEADS) * TOKENS * directions * HEAD_DIM
    assert cost(name).flops == forward
    assert cost(name, backward=True).flops == forward + backward - anew


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", PERFORMERS)
def test_causal_linear_attention_adds_the_pairs_within_a_chunk(name, backward, monkeypatch) -> None:
    for module in (scaled_chunks, causal_exponential):
        monkeypatch.setattr(module, "CHUNK", 4)
    directions = inputs_of_the_operator(name)[4]
    repeats = OPTIONS[name]["num_features"] // len(directions)

    def features(x: Tensor) -> Tensor:
        return (x @ directions.mT).repeat(1, 1, 1, repeats)

    def chunk_by_chunk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One head of keys at a time; the column of denominators apart, since ones have no gradient."""
        rows, sums, ones = [], 0.0, torch.ones(BATCH, KV_HEADS, TOKENS, 1)
        per_key_head = HEADS // KV_HEADS
        for part in map(slice, range(0, TOKENS, 4), range(4, TOKENS + 4, 4)):
            of_q, of_k = features(q[:, :, part]), features(k[:, :, part])
            past = torch.cat([of_k.mT @ v[:, :, part], of_k.mT @ ones[:, :, part]], dim=-1)
            sums = sums + past
            rows.append((of_q @ sums.repeat_interleave(per_key_head, dim=1)).sum(-1))
            of_k, values, one = (
                x.repeat_interleave(per_key_head, dim=1) for x in (of_k, v[:, :, part], ones[:, :, part])
            )
            for i in range(of_k.shape[2]):
                scores = of_q[:, :, i : i + 1] @ of_k[:, :, : i + 1].mT
                read = scores @ values[:, :, : i + 1], scores @ one[:, :, : i + 1]
                rows.append(torch.cat(read, dim=-1).sum(-1))
        return torch.cat(rows, dim=-1)

    expected = counted_passes(chunk_by_chunk, backward=backward)
    assert cost(name, causal=True, backward=backward).flops == expected


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


def state_without_scale(state: Any) -> tuple[Tensor, ...]:
    """The tensors of a state that are not one scale for all features."""
    return state if isinstance(state, Means) else (state.sums,)


def test_kept_bytes_are_scores_mixtures_or_the_state_that_is_carried_on() -> None:
    assert cost("exact").kept_bytes == 0
    assert cost("exact-dense").kept_bytes == 4 * BATCH * HEADS * TOKENS**2
    assert cost("linformer").kept_bytes == 4 * BATCH * KV_HEADS * 6 * (HEAD_DIM + VALUE_DIM)
    for name in PERFORMERS:
        built = ea.build(name, head_dim=HEAD_DIM, causal=True, **OPTIONS[name])
        assert cost(name).kept_bytes == sum(
            x.nbytes for x in state_without_scale(built.extend(*tensors())[1])
        )


@pytest.mark.parametrize("name", LINEAR_IN_HEAD_DIM)
def test_operations_grow_with_tokens_as_promised_and_no_faster_than_linearly_with_head_dim(name) -> None:
    """At lengths where edges and directions are below a hundredth."""
    spec = ea.spec(name)

    def flops(tokens: int, head_dim: int) -> int:
        problem = AttentionProblem(head_dim=head_dim, num_heads=1, max_tokens=tokens)
        found = spec.flops(problem, spec.options_type(), tokens)
        assert found is not None
        return found

    tokens = 2**16
    power = spec.capabilities.time_growth
    growth = flops(2 * tokens, 64) / flops(tokens, 64)
    # Only opened clusters take longer than in proportion to the tokens.
    assert growth == pytest.approx(2 if name == "window-clusters" else 2**power, rel=1e-2)
    assert 1.9 < flops(tokens, 128) / flops(tokens, 64) <= 2


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS])
def test_a_block_adds_projections_and_feed_forward_part(kv_heads, backward) -> None:
    model_dim, wide = HEADS * HEAD_DIM, 24
    block = ea.TransformerBlock(model_dim, HEADS, "exact-dense", feed_forward_dim=wide, num_kv_heads=kv_heads)
    x = torch.randn(BATCH, TOKENS, model_dim, requires_grad=backward)

    def call() -> None:
        y = block(x)
        if backward:
            y.sum().backward()

    sizes = {"batch": BATCH, "num_kv_heads": kv_heads, "backward": backward}
    around = block_flops(TOKENS, model_dim=model_dim, feed_forward_dim=wide, num_heads=HEADS, **sizes)
    dense = ea.spec("exact-dense")
    problem = AttentionProblem(head_dim=HEAD_DIM, num_heads=HEADS)
    inside = call_cost(dense, problem, dense.options_type(), TOKENS, **sizes)
    assert inside is not None
    assert around + inside.flops == counted(call)


def test_what_nobody_counted_is_unknown_and_what_cannot_be_counted_is_refused() -> None:
    def mean(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v.mean(dim=2, keepdim=True).expand(q.shape)

    spec = ea.build(mean, head_dim=HEAD_DIM).spec
    problem = AttentionProblem(head_dim=HEAD_DIM)
    assert spec.flops(problem, None, TOKENS) is None
    assert call_cost(spec, problem, None, TOKENS) is None
    exact = ea.spec("exact")
    with pytest.raises(OptionError, match="num_heads: give the problem one"):
        call_cost(exact, problem, exact.options_type(), TOKENS)


def test_each_gradient_of_a_step_costs_a_product_as_large() -> None:
    flops = [matmul_flops(MatMul(10, gradients=sides), backward=True) for sides in (0, 1, 2)]
    assert flops == [20, 40, 60]
