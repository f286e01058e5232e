"""Dyadic runs of far keys: keys clustered together, their readers, and the size of the clusters.

Run (level, number) has the stretches number · 2^level … (number + 1) · 2^level − 1, of as many keys as a
cluster. The keys before a slice are the runs of the binary digits of their number; runs after a slice double
with the distance. The runs before a slice are complete before the first query that reads them, so that no
later key moves a key to another cluster.
"""

from typing import NamedTuple

from efficient_attn.ops.clusters.near import Layout

# (level, number)
Run = tuple[int, int]


class Stage(NamedTuple):
    """Queries begin … end − 1, in blocks of `layout.block`; clusters have as many keys as a block."""

    layout: Layout
    begin: int
    end: int

    def since(self, position: int) -> "Stage":
        """The blocks from that of a position on."""
        begin = max(self.begin, position // self.layout.block * self.layout.block)
        return self._replace(begin=min(begin, self.end))

    def runs(self, tokens: int, causal: bool) -> list[list[Run]]:
        """Runs of the far keys of each block, in order; the last run may reach beyond the tokens."""
        size = self.layout.block
        last = 0 if causal else -(-tokens // size)
        blocks = range(self.begin // size, -(-self.end // size))
        return [[*before(max(block - 1, 0)), *_after(block + 2, last)] for block in blocks]


def before(end: int) -> list[Run]:
    """Runs of the stretches 0 … end − 1, one per binary digit, the longest first."""
    found, begin = [], 0
    while begin < end:
        level = (end - begin).bit_length() - 1
        found.append((level, begin >> level))
        begin += 1 << level
    return found


def _after(begin: int, end: int) -> list[Run]:
    """Runs of the stretches begin … end − 1, each the longest that begins there."""
    found = []
    while begin < end:
        level = (begin & -begin).bit_length() - 1
        found.append((level, begin >> level))
        begin += 1 << level
    return found


def full_stages(tokens: int, *, block: int, clusters: int, first: int) -> list[Stage]:
    """Stages of all queries, for clusters of each size that the first `reach(stage)` tokens need.

    Args:
        block: Number of keys in the smallest clusters.
        clusters: Largest number of clusters per query.
        first: Number of global tokens.
    """
    found = [Stage(Layout(block, block, block, first), 0, tokens)]
    while tokens > reach(found[-1], clusters):
        block *= 2
        found.append(Stage(Layout(block, block, block, first), 0, tokens))
    return found


def reach(stage: Stage, clusters: int) -> int:
    """Largest number of tokens with few enough clusters; a slice takes the place of two at the ends."""
    return (clusters + 2) * stage.layout.block


def causal_stages(tokens: int, *, block: int, clusters: int, first: int) -> list[Stage]:
    """Stages of the queries one after the other, in which the size of the clusters doubles.

    Args:
        block: Number of keys in the smallest clusters.
        clusters: Largest number of clusters per query, at least 2.
        first: Number of global tokens.
    """
    # An even number of blocks, so that the next stage begins with a whole block.
    blocks = max((clusters + 2) // 2 * 2, 4)
    found, begin = [], 0
    while begin < tokens:
        end = min(blocks * block, tokens)
        found.append(Stage(Layout(block, block, 0, first), begin, end))
        begin, block = end, 2 * block
    return found


class Places(NamedTuple):
    """Clusters of the runs of some blocks, counted from run to run.

    Attributes:
        runs: All runs, the longest first.
        read: Clusters that each block reads.
    """

    runs: list[Run]
    read: list[list[int]]


def places(blocks: list[list[Run]], stretches: int) -> Places:
    """Clusters that some blocks read; clusters beyond the last stretch have no keys and are left out."""
    runs = sorted({run for block in blocks for run in block}, reverse=True)
    of_run, begin = {}, 0
    for level, number in runs:
        filled = min(1 << level, stretches - (number << level))
        of_run[level, number] = range(begin, begin + filled)
        begin += 1 << level
    return Places(runs, [[one for run in block for one in of_run[run]] for block in blocks])
