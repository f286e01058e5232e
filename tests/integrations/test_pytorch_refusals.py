"""What `ea.MultiheadAttention` cannot honour, it refuses: when it is built, or when it is called."""

from typing import Any

import pytest
import torch
from integrations.multihead_twins import BATCH, DIM, HEADS, KEYS, LATER, TOKENS, draw

import efficient_attn as ea

REFUSED_WHEN_BUILT = [
    ({"num_heads": 5}, "embed_dim=12 is not divisible by num_heads=5"),
    ({"add_bias_kv": True}, "add_bias_kv=True adds a key, which no backend supports"),
    ({"add_zero_attn": True}, "add_zero_attn=True adds a key, which no backend supports"),
    ({"backend": "window", "dropout": 0.1}, "has no attention weights to drop.*backend='exact'"),
    ({"backend": "linformer", "max_tokens": 8, "causal": True}, "cannot be causal. Causal backends: exact"),
    ({"backend": "linformer"}, "build it with max_tokens"),
    ({"backend": "sdpa"}, "Here it is 'exact'"),
    ({"backend": "window", "num_features": 3}, "No option of backend 'window' is called 'num_features'"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED_WHEN_BUILT)
def test_what_cannot_be_built_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ea.AttentionError, match=message):
        ea.MultiheadAttention(**{"embed_dim": DIM, "num_heads": HEADS, **arguments})


NUMBERS = draw(BATCH * HEADS, TOKENS, TOKENS)
REFUSED_WHEN_CALLED = [
    ({}, {"need_weights": True}, "pass need_weights=False"),
    ({}, {"attn_mask": LATER}, "supports no attn_mask: use causal=True for the causal mask"),
    ({}, {"is_causal": True}, "built with causal=False, and backend 'window' supports no attn_mask"),
    ({"causal": True}, {}, "is not causal: pass is_causal=True"),
    (
        {"causal": True},
        {"attn_mask": LATER.mT},
        "not the causal mask, and backend 'window' supports no other",
    ),
    ({"causal": True}, {"attn_mask": NUMBERS}, "not the causal mask.*use backend='exact'"),
    ({}, {"key_padding_mask": NUMBERS[:BATCH, 0]}, "has entries other than 0.*or use backend='exact'"),
    ({}, {"key_padding_mask": LATER}, r"key_padding_mask has shape \[5, 5\].*here \[2, 5\]"),
    ({}, {"key_padding_mask": LATER[:BATCH].int()}, "key_padding_mask is torch.int32; expected bool"),
    ({"backend": "exact"}, {"attn_mask": LATER[:2]}, r"attn_mask has shape \[2, 5\]"),
    ({"backend": "exact", "max_distance": 4}, {"attn_mask": NUMBERS}, "layer with max_distance"),
    ({"backend": "exact", "max_distance": 4}, {"need_weights": True}, "layer with max_distance"),
    ({"backend": "exact", "max_distance": 4}, {"is_causal": True}, "build it with causal=True"),
    ({"backend": "exact"}, {"attn_mask": "causal"}, "attn_mask is a torch tensor"),
]


@pytest.mark.parametrize(("arguments", "call", "message"), REFUSED_WHEN_CALLED)
def test_what_a_backend_cannot_honour_is_refused_and_never_ignored(
    arguments: dict[str, Any], call: dict[str, Any], message: str
) -> None:
    layer = ea.MultiheadAttention(DIM, HEADS, dtype=torch.float64, **{"backend": "window", **arguments})
    x = draw(TOKENS, BATCH, DIM)
    with pytest.raises(ea.AttentionError, match=message):
        layer(x, x, x, **{"need_weights": False, **call})


def test_inputs_that_do_not_fit_are_refused_by_name() -> None:
    layer = ea.MultiheadAttention(DIM, HEADS, dtype=torch.float64)
    x, longer = draw(TOKENS, BATCH, DIM), draw(KEYS, BATCH, DIM)
    for inputs, message in (
        ((x[..., 1:], x, x), r"query has shape \[5, 2, 11\].*\[tokens, batch, dim\].*dim=12"),
        ((x, x[0], x), r"key has shape \[2, 12\]"),
        ((x, x, longer), r"key has shape \[5, 2, 12\] and value \[7, 2, 12\]"),
        ((x.long(), x, x), "query is torch.int64"),
    ):
        with pytest.raises(ea.AttentionError, match=message):
            layer(*inputs)
    with pytest.raises(ea.ShapeError, match="is_causal is ambiguous"):
        layer(x, longer, longer, is_causal=True)
    layer.dropout = 0.5
    with pytest.raises(ea.UnsupportedError, match=r"dropout is 0\.5 and the backend was built with 0\.0"):
        layer(x, x, x)
