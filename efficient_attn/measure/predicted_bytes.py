"""Predicted peak memory of a case: inputs, weights, intermediate vectors and score matrices."""

from efficient_attn.measure.record import Case

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

# Score matrices alive at once in naive attention: scores and weights; in the backward pass the weights of
# every layer, their gradient and the gradient of the scores.
_DENSE_SCORES = 2

# Vectors of a token alive at once. Attention: q, k, v, the output; in the backward pass their gradients too.
_ATTENTION_VECTORS = {False: 4, True: 8}

# A block: x, the two sums around the feed-forward part, its eight inside (before and after ReLU). The
# backward pass keeps twelve per block: q, k, v, their output, two sums, two norms, four inside.
_BLOCK_VECTORS, _KEPT_VECTORS = 11, 12

# Weights of a block in units of model_dim²: four projections, and two of the feed-forward part, which is
# four times as wide.
_SQUARES = 12


def predict_bytes(case: Case, memory_growth: int) -> int:
    """Bytes of vectors and weights, their gradients, and of score matrices if memory grows with n²."""
    item = ITEM_BYTES[case.dtype]
    vector = item * case.batch * case.tokens * case.model_dim
    scores = item * case.batch * case.num_heads * case.tokens**2 if memory_growth > 1 else 0
    layers = case.layers or 1
    dense = _DENSE_SCORES + (layers if case.backward else 0)
    if case.of == "attention":
        return _ATTENTION_VECTORS[case.backward] * vector + dense * scores
    weights = layers * _SQUARES * item * case.model_dim**2
    vectors = _BLOCK_VECTORS + (layers * _KEPT_VECTORS if case.backward else 0)
    return (2 if case.backward else 1) * weights + vectors * vector + dense * scores
