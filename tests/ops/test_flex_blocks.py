"""Chosen blocks of keys as one call of FlexAttention, on the CPU."""

from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest
import torch
from cpu_flex_attention import on_flex
from reference import random_mask, random_qkv
from torch.nn.attention import flex_attention

import efficient_attn as ea
from efficient_attn.conformance import kernel_check
from efficient_attn.ops import blocks, paths
from efficient_attn.ops.softmax import flex

BACKENDS = [("bigbird", {"block": 16}), ("bigbird", {"block": 64, "random_blocks": 0, "global_blocks": 2})]
BACKENDS += [("block-topk", {"block": 16, "blocks": 2}), ("block-topk", {"block": 32, "blocks": 9})]


def listed_blocks(q, k, v, *, block_mask, scale, enable_gqa, kernel_options):
    """`flex_attention` as documented: keys of the listed blocks that the mask shows, by tiles of a block."""
    assert all(block_mask.BLOCK_SIZE[0] % kernel_options[name] == 0 for name in ("BLOCK_M", "BLOCK_N"))
    tokens, group = q.shape[2], q.shape[1] // k.shape[1]
    assert enable_gqa == (group > 1) and block_mask.seq_lengths == (tokens, tokens)
    at = torch.arange(tokens)
    block = at // block_mask.BLOCK_SIZE[0]
    count, listed = block_mask.kv_num_blocks[..., None, None], block_mask.kv_indices[..., None]
    read = (listed == torch.arange(len(listed[0, 0]))) & (torch.arange(listed.shape[3])[:, None] < count)
    # The kernel counts the keys of a block as often as it is listed.
    assert (read.sum(dim=3) <= 1).all()
    visible = read.any(dim=3)[:, :, block][..., block]
    visible = visible & block_mask.mask_mod(at, at, at[:, None], at)
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    return (scale * q @ k.mT).masked_fill(~visible, -torch.inf).softmax(-1) @ v


@contextmanager
def on_flex_by_lists(attention=listed_blocks):
    """FlexAttention serves the CPU, by operators and in any dtype."""
    with (
        on_flex(),
        patch.object(flex, "compiled", lambda function, *key: function),
        patch.object(flex_attention, "flex_attention", attention),
    ):
        yield


def inputs(tokens):
    return random_qkv(2, 4, 2, tokens, tokens, 16, 24)


def called(backend, *tensors, **options):
    """Output, and the names of the kernels that served."""
    with paths.observed_kernels() as names:
        out = backend(*tensors, **options)
    return out, names


@pytest.mark.parametrize(("tokens", "scale"), [(1, 0.25), (16, 0.25), (100, -0.25)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("name", "options"), BACKENDS)
def test_one_call_equals_the_path_of_operators(name, options, causal, tokens, scale):
    backend = ea.build(name, head_dim=16, causal=causal, scale=scale, **options)
    tensors = inputs(tokens)
    expected, names = called(backend, *tensors)
    assert not names
    with on_flex_by_lists():
        out, names = called(backend, *tensors)
    assert names == {"flex"} and (out - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("case", ["mask", "gradients", "part", "block of 8"])
def test_operators_serve_masks_gradients_parts_and_other_blocks(case):
    backend = ea.build("bigbird", head_dim=16, causal=True, block=8 if case == "block of 8" else 16)
    q, k, v = inputs(100)
    mask = random_mask(2, 100) if case == "mask" else None
    if case == "gradients":
        q.requires_grad_()
    with on_flex_by_lists():
        _, names = called(backend, q[:, :, 50:] if case == "part" else q, k, v, key_mask=mask)
    assert not names


def without_causality(attention, q, k, v, *, block_mask, **options):
    block_mask.mask_mod = lambda entry, head, query, key: key >= 0
    return attention(q, k, v, block_mask=block_mask, **options)


def last_block_missed(attention, q, k, v, *, block_mask, **options):
    block_mask.kv_num_blocks = (block_mask.kv_num_blocks - 1).clamp_min(1)
    return attention(q, k, v, block_mask=block_mask, **options)


def heads_swapped(attention, q, k, v, *, block_mask, **options):
    block_mask.kv_indices = block_mask.kv_indices.roll(1, dims=1)
    return attention(q, k, v, block_mask=block_mask, **options)


def wrong_scale(attention, q, k, v, *, scale, **options):
    return attention(q, k, v, scale=1.01 * scale, **options)


@pytest.mark.parametrize("fault", [None, without_causality, last_block_missed, heads_swapped, wrong_scale])
def test_the_check_of_a_gpu_accepts_the_right_call_and_no_faulty_one(fault):
    attention = listed_blocks if fault is None else partial(fault, listed_blocks)
    cases = [kernel_check.KernelCase(5, 129, False, grouped, 16) for grouped in (False, True)]
    with on_flex_by_lists(attention):
        result = kernel_check.check_kernel("blocks-flex", "tf32", device="cpu", cases=cases)
    assert result["served"] == 2 and bool(result["failed"]) == (fault is not None)


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(("name", "causal"), [("block-topk", True), ("bigbird", False)])
def test_the_kernel_of_the_cpu_reads_the_listed_blocks(monkeypatch, name, causal):
    # That kernel requires as many numbers of blocks as there are blocks of keys.
    numbers = blocks.blocks_read

    def all_numbers(queries, real, k, pattern, sums):
        read = numbers(queries, real, k, pattern, sums)
        return torch.nn.functional.pad(read, (0, len(queries) - read.shape[3]), value=len(queries))

    backend = ea.build(name, head_dim=16, causal=causal, block=32)
    tensors = [x.float() for x in inputs(700)]
    expected, _ = called(backend, *tensors)
    # No public function lies between the lists and the kernel.
    monkeypatch.setattr(blocks, "blocks_read", all_numbers)
    monkeypatch.setattr(blocks, "tuned_for_cpu", lambda x: False)
    with on_flex(), torch.no_grad():
        out, names = called(backend, *tensors)
    assert names == {"flex"}
    torch.testing.assert_close(out, expected)
