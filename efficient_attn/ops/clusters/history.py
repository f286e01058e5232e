"""Segments of the past, whose length grows with it and whose number does not."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.clusters.summaries import Summary


def plan(cells: int, segments: int) -> list[tuple[int, int]]:
    """Division of the first `cells` cells into about `segments` segments: (level, number), in order.

    Segment (level, number) has the cells number · 2^level … (number + 1) · 2^level − 1. All segments have the
    lowest level at which they are few enough; the binary digits of the remainder divide the remaining cells,
    which can add one segment per digit.
    """
    level = 0
    while (cells >> level) + level > max(segments, 1 + level):
        level += 1
    found = [(level, number) for number in range(cells >> level)]
    done = (cells >> level) << level
    for lower in range(level - 1, -1, -1):
        if (cells - done) >> lower:
            found.append((lower, done >> lower))
            done += 1 << lower
    return found


def past_segments(
    k: Tensor, v: Tensor, counted: Tensor, *, starts: list[int], cell: int, segments: int, group: int
) -> Iterator[Summary]:
    """Summaries of the segments before each start, each with one mean key and mean value.

    Args:
        k: [batch heads tokens head_dim]; v: [batch heads tokens value_dim].
        counted: Keys that enter the sums, bool [batch tokens].
        starts: Multiples of `cell`.
        cell: Number of tokens in the smallest segment.
        segments: Largest number of segments before a start.
        group: Number of starts per yielded summary.

    Yields:
        [batch heads group segments …].
    """
    rows = torch.cat([k, v, torch.ones_like(k[..., :1])], dim=-1) * counted[:, None, :, None]
    rows = F.pad(rows, (0, 0, 0, -rows.shape[2] % cell)).unflatten(2, (-1, cell)).sum(dim=3)
    levels, offsets = [rows], [0]
    while levels[-1].shape[2] > 1:
        # Sums of neighbouring pairs, level by level: differences of prefix sums would cancel small terms.
        pairs = levels[-1].shape[2] // 2
        offsets.append(offsets[-1] + levels[-1].shape[2])
        levels.append(levels[-1][:, :, : 2 * pairs].unflatten(2, (pairs, 2)).sum(dim=3))
    table = torch.cat([*levels, torch.zeros_like(rows[:, :, :1])], dim=2)
    nothing = table.shape[2] - 1
    for number in range(0, len(starts), group):
        plans = [plan(start // cell, segments) for start in starts[number : number + group]]
        most = max(1, *map(len, plans))
        places = [[offsets[level] + one for level, one in found] for found in plans]
        places = [place + [nothing] * (most - len(place)) for place in places]
        sums = table[:, :, torch.tensor(places, device=k.device)]
        if most > segments:
            # The most recent segments share the last place.
            last = sums[:, :, :, segments - 1 :].sum(dim=3, keepdim=True)
            sums = torch.cat([sums[:, :, :, : segments - 1], last], dim=3)
        count = sums[..., -1:]
        alive = count > 0
        count = torch.where(alive, count, 1.0)
        means = sums / count
        yield Summary(means[..., : k.shape[3]], means[..., k.shape[3] :], count.log(), alive)
