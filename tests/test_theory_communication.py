"""The cost model of exchanges: limits, growth with the ranks, and refusals."""

import math
import re
from pathlib import Path

import pytest

from efficient_attn.errors import OptionError, UnknownNameError
from efficient_attn.theory.communication import EXCHANGES, NETWORK, NODE, Link, communication

STATE = 1_081_344


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_one_rank_exchanges_nothing(exchange):
    assert communication(exchange, STATE, 1) == 0


@pytest.mark.parametrize("ranks", [2, 8])
def test_in_one_node_only_its_links_count(ranks):
    slow = Link(1.0, 1.0)
    for exchange in EXCHANGES:
        seconds = communication(exchange, STATE, ranks, network=slow)
        assert NODE.latency_s < seconds == communication(exchange, STATE, ranks) < 1


def test_a_gather_brings_every_state_to_every_rank_and_others_grow_with_the_logarithm():
    # Without latency a gather takes (P − 1) states, each over the link that it arrives by.
    fast, slow = Link(0.0, 4.0), Link(0.0, 2.0)
    seconds = communication("gather", 8, 32, ranks_per_node=4, node=fast, network=slow)
    assert seconds == 3 * 8 / 4 + 7 * 8 / 2 + 7 * 3 * 8 / 4
    # Without bytes every exchange is a number of latencies.
    steps = {
        exchange: communication(exchange, 1, 1024, node=Link(1.0, math.inf), network=Link(1.0, math.inf))
        for exchange in EXCHANGES
    }
    assert steps == {"all-reduce": 2 + 2 * 7, "gather": 1 + 1, "scan": 10, "two-level": 1 + 7}


def test_an_all_reduce_moves_twice_the_state_in_a_node_and_its_part_across():
    seconds = communication("all-reduce", 80, 16, node=Link(0.0, 2.0), network=Link(0.0, 5.0))
    assert seconds == 2 * 70 / 2 + 2 * 10 / 5


def test_a_gather_is_the_fastest_in_a_node_and_the_slowest_of_many_nodes():
    assert communication("gather", STATE, 8) < communication("scan", STATE, 8)
    assert communication("gather", STATE, 1024) > 10 * communication("scan", STATE, 1024)
    assert communication("scan", STATE, 1024) > communication("two-level", STATE, 1024)
    assert NETWORK.seconds(STATE) > NODE.seconds(STATE)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (("ring", STATE, 8), UnknownNameError, "ring"),
        (("scan", 0, 8), OptionError, "state_bytes must be a whole number of at least 1, not 0"),
        (("scan", STATE, 0), OptionError, "ranks must be a whole number of at least 1, not 0"),
        (
            ("scan", STATE, 12),
            OptionError,
            "ranks=12 is no multiple of ranks_per_node=8; nodes are full here",
        ),
    ],
)
def test_a_wrong_request_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        communication(*given)


def test_the_table_on_the_page_is_the_prediction():
    page = (Path(__file__).parent.parent / "docs/theory.md").read_text(encoding="utf-8")
    section = page.partition("## Communication between ranks")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", section, re.MULTILINE)
    assert len(rows) == 6
    for ranks, cells in rows:
        made = [f"{1e3 * communication(one, STATE, int(ranks)):.2f}" for one in EXCHANGES]
        assert made == cells.split(" | ")
