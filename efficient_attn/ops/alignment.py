"""Alignment of sequences at their first real token, score biases, and padded rows."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.dtypes import upcast, zero_masked

# Score bias of a masked key: finite, since a gradient multiplies it by zero.
MASKED = -1e30
# First token and end of a part of each batch entry.
Spans = list[list[int]]


class Alignment(NamedTuple):
    """Queries, and keys that begin with a real key in every batch entry that has one.

    Attributes:
        q: [batch heads queries head_dim].
        k: [batch kv_heads tokens head_dim], zero where masked.
        v: [batch kv_heads tokens value_dim], zero where masked.
        real: Whether a key is real, bool [batch tokens].
        positions: Positions of consecutive queries among the keys, in the order of q.
        shift: Number of tokens before the first real one, which were rotated to the end with their queries,
            [batch]; None: nothing was rotated.
        queries: Number of queries of the call, the last tokens if anything was rotated.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    real: Tensor
    positions: Sequence[range]
    shift: Tensor | None
    queries: int

    def runs(self) -> Iterator[tuple[Tensor, range]]:
        # A split has an operator of its own in the backward pass.
        single = len(self.positions) == 1
        parts = (self.q,) if single else self.q.split([len(span) for span in self.positions], dim=2)
        return zip(parts, self.positions, strict=True)

    def restored(self, outs: list[Tensor], *, zero_padding: bool = False) -> Tensor:
        """Outputs of the queries of the call, from the outputs of `runs`.

        Args:
            zero_padding: Whether queries before the first real token have the output 0.
        """
        out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
        if self.shift is None:
            return out
        out = rotated(out, -self.shift)
        if zero_padding:
            # Padding before the first real token was rotated to the end.
            padding = torch.arange(out.shape[2], device=out.device) < self.shift[:, None]
            out = out.masked_fill(padding[:, None, :, None], 0.0)
        return out[:, :, out.shape[2] - self.queries :]


def alignment(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, positions: Sequence[range] | None
) -> Alignment:
    """The queries of a call at their positions, with keys and values in float32 or better.

    Args:
        positions: Positions of consecutive queries, where every first key is real if any is; None: the
            queries are the last tokens.
    """
    k, v = upcast(zero_masked(k, key_mask)), upcast(zero_masked(v, key_mask))
    tokens, queries = k.shape[2], q.shape[2]
    last = [range(tokens - queries, tokens)]
    if key_mask is None:
        real = torch.ones(k.shape[0], tokens, dtype=torch.bool, device=k.device)
        return Alignment(q, k, v, real, positions or last, None, queries)
    if positions is not None:
        return Alignment(q, k, v, key_mask, positions, None, queries)
    # A mask may put the queries anywhere.
    q, shift = F.pad(q, (0, 0, tokens - queries, 0)), key_mask.long().argmax(dim=-1)
    q, k, v, real = (rotated(x, shift) for x in (q, k, v, key_mask[:, None, :, None]))
    return Alignment(q, k, v, real[:, 0, :, 0], [range(tokens)], shift, queries)


def alike(mask: Tensor) -> list[tuple[slice, int]]:
    """Runs of batch entries with the same first real token, and this token (number of tokens: none)."""
    first = torch.where(mask.any(dim=1), mask.long().argmax(dim=1), mask.shape[1]).tolist()
    groups, begin = [], 0
    for start, entries in groupby(first):
        end = begin + len(list(entries))
        groups.append((slice(begin, end), start))
        begin = end
    return groups


def real_spans(mask: Tensor) -> Spans | None:
    """First real token and end of the real tokens of each batch entry, or nothing if all are real.

    None: masked tokens lie between real ones.
    """
    start, at = mask.byte().argmax(dim=1, keepdim=True), torch.arange(mask.shape[1], device=mask.device)
    end = start + mask.sum(dim=1, keepdim=True)
    if not torch.equal((at >= start) & (at < end), mask):
        return None
    spans: Spans = torch.cat([start, end], dim=1).tolist()
    return [] if all(span == [0, mask.shape[1]] for span in spans) else spans


def rotated(x: Tensor, by: Tensor) -> Tensor:
    """`x` rotated along the tokens: token i of the result is token i + by of x."""
    index = (torch.arange(x.shape[2], device=x.device) + by[:, None]) % x.shape[2]
    return x.gather(2, index[:, None, :, None].expand_as(x))


def aligned(at: Tensor, tokens: int, key_mask: Tensor | None) -> Tensor:
    """Positions of tokens in an `Alignment`, [batch tokens], or [1 tokens] without a mask."""
    shift = 0 if key_mask is None else key_mask.long().argmax(dim=1, keepdim=True)
    return (at[None] - shift) % tokens


def bias_of(visible: Tensor, like: Tensor) -> Tensor:
    """Score bias of keys in the dtype of `like`: 0 where visible."""
    return torch.zeros_like(visible, dtype=like.dtype).masked_fill(~visible, MASKED)


def first_columns(x: Tensor, width: int) -> Tensor:
    """The columns before the padding of `padded_rows`. A slice of all would be a call for nothing."""
    return x if x.shape[-1] == width else x[..., :width]


def padded_rows(x: Tensor, width: int) -> Tensor:
    """`x` with zero columns up to the width. F.pad would copy even without any."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
