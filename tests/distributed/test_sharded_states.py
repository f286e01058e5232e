"""Causal states of all ranks by a gather, a scan, and both on two levels."""

from collections import Counter
from threading import get_ident

import pytest
import torch
from threads import assert_ranks_are_the_whole, bytes_sent, drawn

import efficient_attn as ea
from efficient_attn.conformance.threads import on_threads
from efficient_attn.distributed import layout as layouts
from efficient_attn.distributed.calls import exchange_of
from efficient_attn.distributed.layout import KINDS, Layout, local_tokens, ranks_per_node

# Ranks, ranks per node, most ranks of a gather, and states that a rank sends at most: to all others, in
# ⌈log₂ ranks⌉ steps, or to the others of its node and in ⌈log₂ nodes⌉ steps.
EXCHANGES = [
    pytest.param(*exchanged, id=f"{name}-{exchanged[0]}-{exchanged[1]}")
    for name, rows in {
        "gather": [(5, 1, 16, 4)],
        "scan": [(2, 1, 1, 1), (3, 1, 1, 2), (5, 1, 1, 3), (8, 1, 1, 3)],
        "two-level": [(4, 2, 2, 2), (6, 2, 2, 3), (6, 3, 3, 3)],
    }.items()
    for exchanged in rows
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "per_node", "most", "states"), EXCHANGES)
def test_states_of_every_exchange_give_rows_and_gradients_of_the_whole_sequence(
    ranks, per_node, most, states, kind, monkeypatch
):
    torch.manual_seed(0)
    monkeypatch.setattr(layouts, "MOST_GATHERED", most)
    tokens = 6 * ranks
    mask = torch.rand(2, tokens) > 0.3
    # A state of no key is merged on the way.
    mask[0, : tokens // ranks + 1] = False
    q, k, v, g = drawn(tokens)
    backend = ea.build("performer-positive", head_dim=8, causal=True, num_features=16).double()
    assert_ranks_are_the_whole(
        backend, [5 * q, 5 * k, 5 * v, g], mask, ranks=ranks, kind=kind, per_node=per_node
    )


@pytest.mark.parametrize(("ranks", "per_node", "most", "states"), EXCHANGES)
def test_ranks_send_the_states_of_their_exchange_forward_and_backward(
    ranks, per_node, most, states, monkeypatch
):
    monkeypatch.setattr(layouts, "MOST_GATHERED", most)
    sent, passes, features, dim = Counter(), {}, 12, 8

    def note(number):
        # Autograd differentiates in the thread of a rank.
        sent.update({(passes[get_ident()], get_ident()): number})

    backend = ea.build("performer-positive", head_dim=dim, causal=True, num_features=features)
    x = torch.randn(1, 1, ranks, dim)

    def call(layout):
        passes[get_ident()] = "forward"
        inputs = [local_tokens(x, 2, layout).requires_grad_() for _ in range(3)]
        out = exchange_of(backend).attend(backend, *inputs, None, layout)
        passes[get_ident()] = "backward"
        out.sum().backward()

    with bytes_sent(note):
        on_threads(ranks, "contiguous", call, per_node=per_node)
    # Sums of values and of ones, and a scale, of every feature in float32.
    expected = states * features * (dim + 2) * 4
    for direction in ("forward", "backward"):
        assert max(number for (way, _), number in sent.items() if way == direction) == expected


def test_states_are_gathered_up_to_16_ranks_and_otherwise_within_full_nodes():
    def near(ranks, per_node):
        return list(Layout(None, "contiguous", ranks - 2, ranks, per_node).near)

    assert near(16, 8) == list(range(16))
    assert near(32, 8) == list(range(24, 32))
    # One node, and nodes of unequal shares of the group.
    assert near(64, 64) == near(64, 1) == [62]

    assert ranks_per_node(list(range(32)), 8) == 8
    assert ranks_per_node(list(range(0, 32, 4)), 8) == 2
    assert ranks_per_node(list(range(12)), 8) == 1
    assert ranks_per_node(list(range(4, 12)), 8) == 4
