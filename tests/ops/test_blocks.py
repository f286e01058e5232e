"""Attention over chosen blocks of keys: which blocks are read and drawn, and what padding changes."""

from collections import Counter

import pytest
import torch
from reference import random_qkv

import efficient_attn as ea
from efficient_attn.ops import naive
from efficient_attn.ops.blocks import Blocks

TOTAL = 12
CASES = [("bigbird", {"block": 4}), ("block-topk", {"block": 4, "blocks": 2}), ("oracle-topk", {"keys": 5})]
PATTERNS = [(1, 0, 0), (3, 1, 2), (5, 2, 3), (3, 0, 40)]


def built(**options):
    sizes = {"window": 3, "global_blocks": 1, "random_blocks": 2, "block": 4}
    return ea.build("bigbird", head_dim=8, **(sizes | options))


def blocks_read(backend, real=TOTAL) -> list[list[int]]:
    """Blocks that each block reads besides itself, for a sequence with `real` blocks of real keys."""
    blocks = Blocks(torch.arange(TOTAL), torch.full((1, 1, 1), real), TOTAL)
    numbers = backend.core.pattern.choose(blocks)[0, 0].tolist()
    return [[number for number in row if number < TOTAL] for row in numbers]


@pytest.mark.parametrize("real", [7, TOTAL])
@pytest.mark.parametrize(("window", "first", "random"), PATTERNS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_block_reads_its_neighbours_the_first_blocks_and_random_ones(causal, window, first, random, real):
    back, ahead = (window - 1, 0) if causal else (window // 2, window // 2)
    backend = built(causal=causal, window=window, global_blocks=first, random_blocks=random)
    for row, read in enumerate(blocks_read(backend, real)):
        if not causal and (row < first or row >= real):
            continue  # its queries read all keys, or are padding
        assert row not in read and len(read) == len(set(read))
        end = row if causal else TOTAL
        always = {x for x in range(end) if row - back <= x <= row + ahead or x < first} - {row}
        possible = set(range(first, row if causal else real)) - always - {row}
        drawn = set(read) - always
        assert always <= set(read) and drawn <= possible
        assert len(drawn) == min(random, len(possible))


@pytest.mark.parametrize("causal", [False, True])
def test_every_block_and_every_pair_of_blocks_is_drawn_as_often(causal):
    draws, row, counts, pairs = 400, 9, Counter(), Counter()
    backend, always = built(causal=causal), {0, 7, 8} if causal else {0, 8, 10}
    for seed in range(draws):
        backend.redraw(seed)
        drawn = sorted(set(blocks_read(backend)[row]) - always)
        counts.update(drawn)
        pairs[tuple(drawn)] += 1
    possible = range(1, 7) if causal else [*range(1, 8), 11]
    number = len(possible) * (len(possible) - 1) // 2
    assert set(counts) == set(possible) and len(pairs) == number
    for times, share in ((counts, 2 / len(possible)), (pairs, 1 / number)):
        error = (draws * share * (1 - share)) ** 0.5
        assert all(abs(count - draws * share) <= 5 * error for count in times.values())


def test_blocks_draw_independently():
    backend, draws, equal = built(causal=False), 200, 0
    for seed in range(draws):
        backend.redraw(seed)
        read = blocks_read(backend)
        # Blocks 1 to 7 are among the eight that either draws from.
        equal += set(read[9]) - {0, 8, 10} == set(read[10]) - {0, 9, 11}
    assert equal <= draws / 10


def test_a_query_without_a_real_key_in_its_blocks_reads_no_later_one():
    backend = built(causal=True, window=1, global_blocks=0, random_blocks=0).double()
    mask = torch.tensor([[True] * 4 + [False] * 2 + [True] * 4])
    out = backend(*random_qkv(1, 2, 2, 10, 10, 8), key_mask=mask)
    assert not out[:, :, 4:6].any() and out[:, :, [3, 6, 9]].any(dim=-1).all()


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("causal", [False, True])
def test_the_keys_read_are_those_of_the_softmax(name, options, causal):
    backend = ea.build(name, head_dim=8, causal=causal, **options).double()
    q, k, _ = random_qkv(2, 4, 2, 45, 45, 8)
    mask = torch.arange(45) >= torch.tensor([[0], [3]])
    read = backend.keys_read(q, k, key_mask=mask, rows=[0, 20, 44])
    weights = backend.attention_weights(q, k, key_mask=mask, rows=[0, 20, 44])
    assert torch.equal(read & mask[:, None, None], weights > 0)


@pytest.mark.parametrize(("name", "options"), CASES[:2])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_the_same_where_they_have_derivatives_of_their_own(name, options, causal):
    backend = ea.build(name, head_dim=8, causal=causal, **options).double()
    leaves = [x.requires_grad_() for x in random_qkv(2, 4, 2, 45, 45, 8)]
    for mask in (None, torch.arange(45) % 20 != 12):
        loss = backend(*leaves, key_mask=None if mask is None else mask.expand(2, -1)).sin().sum()
        expected = torch.autograd.grad(loss, leaves, retain_graph=True)
        actual = torch.autograd.grad(loss, leaves, create_graph=True)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "options"), CASES[:2])
@pytest.mark.parametrize(("causal", "value_dim"), [(False, 8), (True, 5)])
def test_neither_the_layout_nor_the_rest_of_the_batch_changes_the_output(name, options, causal, value_dim):
    backend = ea.build(name, head_dim=8, causal=causal, **options).double()
    # Masks that begin with a real token are served together.
    mask = torch.rand(3, 48, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[:, 0], mask[2, 6:] = True, False
    inputs = random_qkv(3, 4, 2, 48, 48, 8, value_dim)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    for key_mask in (None, mask):
        expected = backend(*inputs, key_mask=key_mask)
        torch.testing.assert_close(backend(*views, key_mask=key_mask), expected, rtol=0, atol=1e-12)
        for entry in range(3):
            part = slice(entry, entry + 1)
            single = backend(*(x[part] for x in inputs), key_mask=None if key_mask is None else mask[part])
            torch.testing.assert_close(single, expected[part], rtol=0, atol=1e-12)


def test_a_head_whose_list_is_shorter_reads_no_key_of_another_head():
    q, k, v = random_qkv(1, 4, 4, 48, 48, 8)
    # Their block is not chosen.
    k[:, 0, 20:24] = -torch.inf
    backend = ea.build("block-topk", head_dim=8, block=4, blocks=11).double()
    expected = ea.build("exact-dense", head_dim=8).double()(q.abs(), k, v)
    torch.testing.assert_close(backend(q.abs(), k, v), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_the_chosen_blocks_are_those_of_the_definition(causal, kv_heads):
    sizes, (q, k, v) = {"block": 4, "blocks": 2}, random_qkv(2, 4, kv_heads, 46, 46, 8)
    backend = ea.build("block-topk", head_dim=8, causal=causal, **sizes).double()
    read = naive.block_topk_keys(q, k, scale=8**-0.5, causal=causal, **sizes)
    assert torch.equal(backend.keys_read(q, k), read)
    expected = naive.softmax_over(q, k, v, read, scale=8**-0.5)
    torch.testing.assert_close(backend(q, k, v), expected, rtol=0, atol=1e-12)
    # Most keys of a long sequence are not read, and no head reads what another one does.
    assert not read[:, :, -1].all() and not torch.equal(read[:, 0], read[:, 1])


def test_keys_are_ranked_in_float64():
    q, k = torch.tensor([[[[1.0, 1e-4]]]]), torch.tensor([[[[1.0, 0.0], [1.0, 1e-4]]]])
    read = ea.build("oracle-topk", head_dim=2, keys=1).keys_read(q, k)
    assert read.tolist() == [[[[False, True]]]]


def test_equal_keys_at_the_end_of_the_choice_are_all_read():
    backend = ea.build("oracle-topk", head_dim=4, keys=2).double()
    k = torch.eye(4, dtype=torch.float64)[[0, 1, 1, 2]][None, None]
    read = backend.keys_read(torch.tensor([[[[3.0, 2, 1, 0]]]], dtype=torch.float64), k)
    assert read.tolist() == [[[[True, True, True, False]]]]
