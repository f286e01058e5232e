"""Estimated error of each row of attention that opens clusters, by the formula of `estimate.py`."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.clusters.closed import choose, in_blocks, steps
from efficient_attn.ops.clusters.estimate import Scores, error_of_rows, largest_score, near_scores
from efficient_attn.ops.clusters.far import clusters_of, summarise
from efficient_attn.ops.clusters.near import in_order, near_slices
from efficient_attn.ops.clusters.opened import open_clusters
from efficient_attn.ops.clusters.probing import Task, probe_clusters
from efficient_attn.ops.clusters.runs import Stage, places
from efficient_attn.ops.dtypes import upcast
from efficient_attn.shapes import KeyMask, Keys, Queries, Values


def probing_with_errors(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    scale: float,
    block: int,
    first: int,
    clusters: int,
    probes: Sequence[int],
    causal: bool,
    key_mask: KeyMask | None,
) -> Tensor:
    """`probe_clusters` in float32 or better, and the estimated error of each row in a last column."""
    return probe_clusters(
        *map(upcast, (q, k, v)),
        scale=scale,
        block=block,
        first=first,
        clusters=clusters,
        probes=probes,
        causal=causal,
        key_mask=key_mask,
        read=_read_stage,
    )


def _read_stage(task: Task, q: Tensor, stage: Stage) -> Tensor:
    """Outputs of the queries of a stage of `probe_clusters`, and their estimated errors."""
    (_, _, tokens, head_dim), value_dim = task.k.shape, task.v.shape[3]
    layout, size = stage.layout, stage.layout.block
    slices = near_slices(q, task.k, task.v, task.real, layout, past=task.causal, begin=stage.begin // size)
    visible = None
    if task.causal:
        visible = torch.ones(size, 2 * size, dtype=torch.bool, device=q.device).tril(size)
    runs, read = places(stage.runs(tokens, task.causal), -(-tokens // size))
    if not runs:
        near_k, near_v = slices.near()
        near = near_scores(slices.rows, near_k, visible)
        out = near.softmax(dim=4) @ near_v[..., :value_dim]
        return in_order(F.pad(out, (0, 1)), q, layout)
    clusters = clusters_of(task.k, task.v, task.counted, runs, size, shared=not task.causal)
    summaries = summarise(clusters, slices.rows.shape[4])
    # Mean |v|² of each cluster, and last of the empty one.
    squares = clusters.v.square().sum(dim=4) * clusters.counted
    squares = F.pad(squares.sum(dim=3) / clusters.counted.sum(dim=3).clamp_min(1), (0, 1))
    limits = None if task.limits is None else task.limits.repeat_interleave(size, dim=1)
    plan, found = list(steps(read, stage.begin // size, slices.rows, clusters.k.shape[2])), []
    for step, some in zip(plan, slices.split([step.blocks for step in plan]), strict=True):
        near_k, near_v = some.near()
        near = near_scores(some.rows, near_k, visible)
        closed = choose(some.rows, summaries, step, task.probes, limits)
        mean, spread, chosen = (
            in_blocks(x.mT, some.rows) for x in (closed.mean, 2 * closed.half_variance, closed.chosen)
        )
        opened, opened_sum = (
            x.unflatten(2, some.rows.shape[2:4])
            for x in open_clusters(some.rows[..., :head_dim].flatten(2, 3), chosen.flatten(2, 3), clusters)
        )
        mass = ((1 + spread / 2).square() / 2 + 0.5).log()
        log_weights = torch.cat([near, opened_sum, mean + mass], dim=4).log_softmax(dim=4)
        by_near, by_opened, by_far = log_weights.split([x.shape[4] for x in (near, opened_sum, mean)], dim=4)
        # The blocks of a group read the same summaries.
        blocks = step.blocks // len(step.read)
        means, mean_squares = (
            x.repeat_interleave(blocks, dim=2)
            for x in (closed.far.v[..., :value_dim], squares[:, :, step.read].unsqueeze(4))
        )
        out = by_near.exp() @ near_v[..., :value_dim] + by_opened.exp() * opened + by_far.exp() @ means
        error = error_of_rows(by_far, Scores(spread, mass, largest_score(size)), out, means, mean_squares)
        found.append(torch.cat([out, error], dim=4))
    return in_order(torch.cat(found, dim=2), q, layout)
