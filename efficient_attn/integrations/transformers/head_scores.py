"""How much the output of a decoder's layers changes if a key head reads a window instead of all keys."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from efficient_attn.integrations.transformers.assignment import EXACT, Choice
from efficient_attn.integrations.transformers.attachment import installed
from efficient_attn.integrations.transformers.sites import AttentionSite
from efficient_attn.integrations.transformers.swapping import AttentionSites, build_layers, forward
from efficient_attn.measure.copies import copies_begin


def head_scores(
    model: Any, sites: AttentionSites, texts: Sequence[Tensor], streaming: Choice
) -> dict[int, list[float]]:
    """{layer: score of each key head}, the sum of its shares of the change in text and in copies.

    The change is the norm of the difference that a key head makes in the output of its layer, after the
    projection, over the norm of that output: what the residual stream sees. One forward pass per text, with
    exact outputs; scores are changes over the mean change of all heads, added over text and copies.

    Args:
        texts: Token ids with copies at their end, [1 tokens] each.
        streaming: The window that a key head would read.
    """
    layers, tokens = sites.layers, texts[0].shape[1]
    windows = build_layers(sites, dict.fromkeys(layers, streaming), max_tokens=tokens, seed=0)
    exact = build_layers(sites, dict.fromkeys(layers, EXACT), max_tokens=tokens, seed=0)
    changes: dict[int, Tensor] = {}

    def watch(site: AttentionSite) -> Any:
        def hook(_: nn.Module, args: Any, named: Any, out: Tensor) -> None:
            difference = windows[site.path](*args, **named) - out
            added = _changes(difference, out, args[1].shape[1], _projection(site.module, out))
            changes[site.layer] = changes.get(site.layer, torch.zeros_like(added)) + added

        return exact[site.path].register_forward_hook(hook, with_kwargs=True)

    with installed(model, sites.ordered, exact):
        for site in sites.swapped:
            windows[site.path].to(next(site.module.parameters()).device)
            watch(site)
        for ids in texts:
            forward(model, ids)
    table = torch.stack([changes[layer] for layer in layers])
    scores = (table / table.mean(dim=(0, 1)).clamp_min(torch.finfo(table.dtype).tiny)).sum(dim=-1)
    return {layer: row.tolist() for layer, row in zip(layers, scores, strict=True)}


def _changes(difference: Tensor, out: Tensor, kv_heads: int, projection: Tensor | None) -> Tensor:
    """Changes [kv_heads 2] by key head, in the text and in the copies."""
    begin = copies_begin(out.shape[2])
    columns: list[Any] = [None] * kv_heads
    if projection is not None:
        columns = list(projection.chunk(kv_heads, dim=1))
    changes = torch.zeros(kv_heads, 2, dtype=torch.float64)
    for number, rows in enumerate((slice(begin), slice(begin, None))):
        norm = _projected(out[:, :, rows], projection).norm()
        for head, change in enumerate(difference[:, :, rows].chunk(kv_heads, dim=1)):
            changes[head, number] = _projected(change, columns[head]).norm() / norm
    return changes


def _projected(x: Tensor, weight: Tensor | None) -> Tensor:
    """[batch heads tokens dim] after its columns of the projection; unchanged without a projection."""
    return x if weight is None else x.transpose(1, 2).flatten(2) @ weight.to(x.dtype).T


def _projection(module: nn.Module, out: Tensor) -> Tensor | None:
    """Weight of the projection of the outputs, the last linear layer that takes all heads, if any."""
    width = out.shape[1] * out.shape[3]
    linear = [x for x in module.children() if isinstance(x, nn.Linear) and x.in_features == width]
    return linear[-1].weight.detach() if linear else None
