"""Cost model of one exchange of states between ranks: the alpha-beta model on two levels of links.

A message of m bytes takes α + β m seconds (Hockney, The communication challenge for MPP, 1994). The n ranks
of a node are connected by a switch and send to all others at once; each of N nodes has one link per rank.
"""

import math
from typing import NamedTuple

from efficient_attn.errors import OptionError, UnknownNameError
from efficient_attn.theory.numbers import count


class Link(NamedTuple):
    """Cost of messages: `latency_s` is α, the inverse of `bytes_per_s` is β."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, size_bytes: float, *, steps: int = 1) -> float:
        """Seconds of consecutive steps that carry `size_bytes` together."""
        return steps * self.latency_s + size_bytes / self.bytes_per_s


# Assumptions, not measured: NCCL over NVLink 4 (450 GB/s peak), and over NDR InfiniBand (50 GB/s peak).
NODE, NETWORK = Link(15e-6, 200e9), Link(25e-6, 40e9)

EXCHANGES = ("all-reduce", "gather", "scan", "two-level")


def communication(
    exchange: str,
    state_bytes: int,
    ranks: int,
    *,
    ranks_per_node: int = 8,
    node: Link = NODE,
    network: Link = NETWORK,
) -> float:
    """Predicted seconds of one exchange of a state of `state_bytes` per rank; nothing is measured.

    With n ranks in a node, N nodes and S bytes:

    - gather: α + (n − 1) S β in the node, α + (N − 1) S β across, and (N − 1) (n − 1) S β to distribute these
      states in the node: every rank receives every state;
    - scan: ⌈log₂ nN⌉ steps of one state, of which each has messages across nodes if there are several;
    - two-level: a gather in the node, and ⌈log₂ N⌉ steps of one state across;
    - all-reduce: reduce-scatter and all-gather of S / n in the node, and a tree of S / n up and down across.

    Args:
        exchange: `all-reduce` of full attention; `gather`, `scan` or `two-level` of causal attention.

    Raises:
        UnknownNameError: If there is no such exchange.
        OptionError: If a number is not positive, or the last node is not full.
    """
    near, far = _messages(exchange, state_bytes, ranks, ranks_per_node)
    return node.seconds(near.size_bytes, steps=near.steps) + network.seconds(far.size_bytes, steps=far.steps)


def sent_bytes(exchange: str, state_bytes: int, ranks: int, *, ranks_per_node: int = 8) -> float:
    """Bytes that a rank sends in one exchange of `communication`: the most of all ranks."""
    return sum(one.size_bytes for one in _messages(exchange, state_bytes, ranks, ranks_per_node))


class _Messages(NamedTuple):
    """Messages of a rank over one kind of link: consecutive steps, and bytes of all together."""

    steps: int
    size_bytes: float


def _messages(
    exchange: str, state_bytes: int, ranks: int, ranks_per_node: int
) -> tuple[_Messages, _Messages]:
    """Messages in the node, and across nodes."""
    if exchange not in EXCHANGES:
        raise UnknownNameError("exchange", exchange, EXCHANGES)
    state_bytes, ranks = count("state_bytes", state_bytes), count("ranks", ranks)
    inside = min(count("ranks_per_node", ranks_per_node), ranks)
    if ranks % inside:
        raise OptionError(f"ranks={ranks} is no multiple of ranks_per_node={inside}; nodes are full here.")
    nodes = ranks // inside
    several, across = int(inside > 1), math.ceil(math.log2(nodes))
    if exchange == "gather":
        near = _Messages(several, (inside - 1) * nodes * state_bytes)
        return near, _Messages(int(nodes > 1), (nodes - 1) * state_bytes)
    if exchange == "scan":
        steps = math.ceil(math.log2(ranks))
        scan, none = _Messages(steps, steps * state_bytes), _Messages(0, 0)
        return (none, scan) if nodes > 1 else (scan, none)
    if exchange == "two-level":
        return _Messages(several, (inside - 1) * state_bytes), _Messages(across, across * state_bytes)
    near = _Messages(2 * several, 2 * (inside - 1) / inside * state_bytes)
    return near, _Messages(2 * across, 2 * across * state_bytes / inside)
