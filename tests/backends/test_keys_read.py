"""Keys that a query reads one by one: their weights are the exact ones up to the row's denominator."""

import pytest
import torch
from reference import random_qkv

import efficient_attn as ea

# The last cluster has two keys: the summary of a single key is this key.
TOKENS = 62
AT = torch.arange(TOKENS)
PADDED = (torch.tensor([[6], [20]]) <= AT) & ((AT < 30) | (torch.tensor([[42], [34]]) <= AT))
BOTH, FULL, CAUSAL = (False, True), (False,), (True,)
BACKENDS = [
    ("exact", {}, BOTH),
    ("window", {"window": 9}, BOTH),
    ("window", {"window": 9, "global_tokens": 3}, BOTH),
    ("window", {"window": 8, "global_tokens": 3}, CAUSAL),
    ("window-clusters", {"window": 8, "clusters": 1}, FULL),
    ("by-head", {"heads": {"1": ("window", {"window": 9})}}, BOTH),
]


def by_weights(backend, q, k, key_mask):
    """Keys whose weight over the exact one is that of the query's own key."""
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    excess = backend.attention_weights(q, k, key_mask=key_mask).log() - 8**-0.5 * (q @ keys.mT)
    own = excess.diagonal(k.shape[2] - q.shape[2], 2, 3).unsqueeze(-1)
    return (excess - own).abs() < 1e-9


@pytest.mark.parametrize(
    ("name", "options", "causal"), [(*row, causal) for *row, both in BACKENDS for causal in both]
)
@pytest.mark.parametrize("key_mask", [None, PADDED], ids=["whole", "padded"])
def test_a_key_is_read_where_its_weight_is_the_exact_one(name, options, causal, key_mask):
    backend = ea.build(name, head_dim=8, causal=causal, **options)
    for queries in (TOKENS, 23) if causal else (TOKENS,):
        q, k, _ = random_qkv(2, 4, 2, queries, TOKENS)
        expected = by_weights(backend, q, k, key_mask)
        real = torch.ones(2, queries, dtype=torch.bool) if key_mask is None else key_mask[:, -queries:]
        read = backend.keys_read(q, k, key_mask=key_mask)
        # A row of padding has no own key.
        assert torch.equal(read & real[:, None, :, None], expected & real[:, None, :, None])
        rows = torch.tensor([1, 7, queries - 1])
        assert torch.equal(backend.keys_read(q, k, key_mask=key_mask, rows=rows), read[:, :, rows])


@pytest.mark.parametrize("causal", BOTH)
@pytest.mark.parametrize("global_tokens", [0, 3])
def test_a_window_reads_as_many_pairs_as_its_operations_count(causal, global_tokens):
    options = {"window": 9, "global_tokens": global_tokens}
    backend = ea.build("window", head_dim=8, causal=causal, **options)
    scores = backend.spec.operations(backend.problem, backend.options, TOKENS, 8)[0]
    read = backend.keys_read(*random_qkv(1, 1, 1, TOKENS, TOKENS)[:2])
    assert int(read.sum()) * 8 == scores.multiply_adds
