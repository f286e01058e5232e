"""Chunks of full linear attention on the CPU follow its cache."""

import pytest
import torch

import efficient_attn as ea
from efficient_attn.ops.linear import inputs as parts
from efficient_attn.ops.linear.full import full_linear_attention


def longest_chunk(monkeypatch, heads, features, cache):
    """Tokens of the longest chunk of a call at 4096 tokens of this many heads."""
    monkeypatch.delenv("EFFICIENT_ATTN_KERNELS", raising=False)
    monkeypatch.setattr(parts, "cache_bytes", lambda: cache)
    backend = ea.build("linear-relu", head_dim=8, num_features=features)
    inputs = backend.core._inputs(*(torch.zeros(1, heads, 4096, 8) for _ in range(3)), None)
    return max(part.stop - part.start for part in parts.chunks(inputs, 4096))


@pytest.mark.parametrize(
    ("heads", "features", "cache", "tokens"),
    [
        (8, 128, 2**20, 256),
        (8, 128, 2**19, 128),
        (4, 128, 2**20, 512),
        # Neither fewer nor more, whatever the cache is.
        (32, 128, 2**20, 112),
        (1, 16, 2**20, 512),
        # A larger cache is not filled: what a chunk holds is memory of a call.
        (8, 128, 2**22, 256),
    ],
)
def test_the_features_of_a_chunk_fill_the_cache_of_a_core(heads, features, cache, tokens, monkeypatch):
    assert longest_chunk(monkeypatch, heads, features, cache) == tokens


def cache_folder(folder, *caches):
    for number, (level, size) in enumerate(caches):
        index = folder / f"index{number}"
        index.mkdir()
        (index / "level").write_text(f"{level}\n")
        (index / "size").write_text(size)
    return folder


def test_the_size_of_the_second_level_cache_is_read_where_linux_states_it(tmp_path):
    folder = cache_folder(tmp_path, (1, "32K\n"), (1, "32K\n"), (2, "2048K\n"), (3, "32768K\n"))
    assert parts.cache_bytes(folder) == 2**21


@pytest.mark.parametrize("caches", [(), ((1, "32K\n"),), ((2, "0K\n"),), ((2, ""),), ((2, "many"),)])
def test_an_unknown_cache_is_taken_for_a_usual_one(caches, tmp_path):
    assert parts.cache_bytes(cache_folder(tmp_path, *caches)) == 2**20
    assert parts.cache_bytes(tmp_path / "absent") == 2**20


def test_chunks_change_no_output(monkeypatch):
    backend = ea.build("linear-relu", head_dim=8, num_features=16)
    inputs = backend.core._inputs(*(torch.randn(1, 2, 1000, 8, dtype=torch.float64) for _ in range(3)), None)
    whole = full_linear_attention(inputs).out
    monkeypatch.setattr(parts, "_LEAST", 1)
    monkeypatch.setattr(parts, "_MOST", 7)
    torch.testing.assert_close(full_linear_attention(inputs).out, whole, rtol=1e-12, atol=1e-12)
