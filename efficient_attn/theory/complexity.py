"""Operation counts of attention: a call of a backend, a transformer block, and the rows of a published table.

Operations are counted for matrix products, two for each multiplication with its addition, as in
`operation_counts`: without masked entries, and without recomputation.

Vaswani et al., Attention Is All You Need (NeurIPS 2017), Table 1 and section 4, compare layers that map n
tokens of width d to n tokens, by operations, sequential operations and maximum path length. Each row is a
function of the sizes. Parts around a layer, such as the projections of attention, are not counted, as in the
paper.
"""

from typing import Any, NamedTuple

from efficient_attn.errors import OptionError
from efficient_attn.operation_counts import MatMul, visible_pairs
from efficient_attn.problem import AttentionProblem, positive_count
from efficient_attn.registry import BackendSpec


class Cost(NamedTuple):
    """Least cost of one call.

    Attributes:
        flops: Operations of the matrix products.
        exponentials: Values of exp, cos and sin in the forward pass.
        moved_bytes: Bytes of inputs, output, parameters and, backward, all their gradients, each once.
        kept_bytes: Bytes of intermediate results of the forward pass.
    """

    flops: int
    exponentials: int
    moved_bytes: int
    kept_bytes: int


def call_cost(
    spec: BackendSpec,
    problem: AttentionProblem,
    options: Any,
    tokens: int,
    *,
    batch: int = 1,
    num_kv_heads: int | None = None,
    value_dim: int | None = None,
    backward: bool = False,
    item_bytes: int = 4,
) -> Cost | None:
    """Cost of one call of a backend, forward or forward and backward; None if it declares no operations.

    Args:
        problem: Problem with num_heads.
        num_kv_heads: Number of key and value heads; None: num_heads.
        value_dim: Entries of one value; None: head_dim.
        item_bytes: Bytes of one number.
    """
    if spec.operations is None:
        return None
    heads = problem.num_heads
    if heads is None:
        raise OptionError("The cost of a call depends on num_heads: give the problem one.")
    kv_heads, width = num_kv_heads or heads, value_dim or problem.head_dim
    operations = spec.operations(problem, options, tokens, width)
    if operations is None:
        return None
    times = [batch * (kv_heads if matmul.shared else heads) for matmul in operations.matmuls]
    matmuls = list(zip(times, operations.matmuls, strict=True))
    tensors = batch * tokens * (heads + kv_heads) * (problem.head_dim + width)
    moved = tensors + operations.learned
    return Cost(
        flops=sum(count * matmul_flops(matmul, backward=backward) for count, matmul in matmuls),
        exponentials=sum(count * matmul.exponentials for count, matmul in matmuls),
        moved_bytes=item_bytes * (moved * (2 if backward else 1) + operations.drawn),
        kept_bytes=item_bytes * sum(count * matmul.kept for count, matmul in matmuls),
    )


def matmul_flops(matmul: MatMul, *, backward: bool) -> int:
    """Operations of a matrix product, and of one more per gradient if `backward`."""
    return 2 * matmul.multiply_adds * (1 + matmul.gradients if backward else 1)


def block_flops(
    tokens: int,
    *,
    model_dim: int,
    feed_forward_dim: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    batch: int = 1,
    backward: bool = False,
) -> int:
    """Operations of a transformer block without its attention: projections and feed-forward network.

    2 n d (d + 2 d_kv) for q, k and v, 2 n d² for the output, 4 n d d_ff (Vaswani et al. 2017, section 3);
    the backward pass doubles each, for the gradients of inputs and parameters.
    """
    kv_dim = model_dim * (num_kv_heads or num_heads) // num_heads
    weights = model_dim * (2 * model_dim + 2 * kv_dim + 2 * feed_forward_dim)
    return matmul_flops(MatMul(batch * tokens * weights), backward=backward)


class Complexity(NamedTuple):
    """One row of Table 1 at given sizes.

    Attributes:
        flops: Operations of one layer's matrix products.
        sequential_operations: Minimum number of sequential operations of one layer.
        path_length: Maximum path length from the first token to the last: layers, and for a recurrent layer
            tokens.
    """

    flops: int
    sequential_operations: int
    path_length: int


class Orders(NamedTuple):
    """One row of Table 1 as printed: n tokens, width d, kernel size k, neighbourhood r."""

    per_layer: str
    sequential_operations: str
    path_length: str


# Rows of Table 1; the last two are from section 4.
TABLE_1 = {
    "self-attention": Orders("n²·d", "1", "1"),
    "recurrent": Orders("n·d²", "n", "n"),
    "convolutional": Orders("k·n·d²", "1", "n/k"),
    "restricted self-attention": Orders("r·n·d", "1", "n/r"),
    "dilated convolutional": Orders("k·n·d²", "1", "log_k n"),
    "separable convolutional": Orders("k·n·d + n·d²", "1", "n/k"),
}


def self_attention(tokens: int, model_dim: int, *, causal: bool = False) -> Complexity:
    """4 n² d, scores and reading: O(n²·d), one step, every token one layer away (Table 1).

    A causal layer has n (n + 1) / 2 pairs of tokens instead of n².
    """
    pairs = visible_pairs(tokens, back=tokens - 1, ahead=0 if causal else tokens - 1)
    return Complexity(4 * pairs * model_dim, 1, 1)


def restricted_self_attention(
    tokens: int, model_dim: int, *, window: int, causal: bool = False
) -> Complexity:
    """4 r n d but for the edges: O(r·n·d), one step, O(n/r) layers from end to end (Table 1).

    The neighbourhood r is `window` keys: half of them on each side of a token; if causal, the last keys.
    """
    back, ahead = _reach("window", window, causal)
    pairs = visible_pairs(tokens, back=back, ahead=ahead)
    return Complexity(4 * pairs * model_dim, 1, _layers(tokens, back))


def recurrent(tokens: int, model_dim: int, *, gates: int = 4) -> Complexity:
    """4 g n d², input and memory into each of g gates: O(n·d²), O(n) steps, O(n) tokens to pass (Table 1).

    Four gates are an LSTM, three a GRU, one is a plain recurrent layer.
    """
    return Complexity(4 * gates * tokens * model_dim**2, tokens, tokens)


def convolutional(tokens: int, model_dim: int, *, kernel_size: int, causal: bool = False) -> Complexity:
    """2 k n d² but for the edges: O(k·n·d²), one step, O(n/k) layers from end to end.

    Table 1 prints the path of dilated convolutions, log_k n; section 4 has the path of contiguous ones.
    """
    back, ahead = _reach("kernel_size", kernel_size, causal)
    pairs = visible_pairs(tokens, back=back, ahead=ahead)
    return Complexity(2 * pairs * model_dim**2, 1, _layers(tokens, back))


def dilated_convolutional(tokens: int, model_dim: int, *, kernel_size: int) -> Complexity:
    """2 k n d² but for the edges, layer l of dilation k^l: O(log_k n) layers from end to end (Table 1).

    Layers are causal, as in WaveNet (van den Oord et al. 2016): l layers see the last k^l tokens. Centred
    layers would meet the edges: for k = 3 the last of 8 tokens never sees the first, since 7 = 9 − 3 + 1
    leads past the end. The operations are counted for the first layer, of dilation 1.
    """
    layer = convolutional(tokens, model_dim, kernel_size=kernel_size, causal=True)
    layers = 1
    while kernel_size**layers < tokens:
        layers += 1
    return layer._replace(path_length=layers)


def separable_convolutional(
    tokens: int, model_dim: int, *, kernel_size: int, causal: bool = False
) -> Complexity:
    """2 k n d + 2 n d² but for the edges: each channel over the tokens, then each token over the channels.

    O(k·n·d + n·d²), one step, O(n/k) layers from end to end (section 4).
    """
    one_channel = convolutional(tokens, 1, kernel_size=kernel_size, causal=causal)
    flops = one_channel.flops * model_dim + 2 * tokens * model_dim**2
    return one_channel._replace(flops=flops)


def _reach(name: str, size: int, causal: bool) -> tuple[int, int]:
    """Reach, in tokens back and ahead, of a neighbourhood of `size` tokens."""
    positive_count(name, size)
    if causal:
        return size - 1, 0
    if size % 2 == 0:
        raise OptionError(f"{name}={size} has no middle; it is odd: {size - 1} or {size + 1}.")
    return size // 2, size // 2


def _layers(tokens: int, back: int) -> int:
    """Number of layers until the last token depends on the first, if each layer reaches `back` tokens."""
    if back == 0 and tokens > 1:
        raise OptionError("A neighbourhood of one token reaches no other, however many layers there are.")
    return max(-(-(tokens - 1) // max(back, 1)), 1)
