"""Queries with their positions among the keys, counted from the first real token."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.dtypes import upcast, zero_masked


class Placed(NamedTuple):
    """Queries, and keys of which the first is real in every batch entry that has a real one.

    Attributes:
        q: [batch heads queries head_dim].
        k: [batch kv_heads tokens head_dim], zero where masked.
        v: [batch kv_heads tokens value_dim], zero where masked.
        real: Whether a key is real, bool [batch tokens].
        positions: Positions of consecutive queries among the keys, in the order of q.
        turned: Number of tokens before the first real one, which were rotated to the end with their queries,
            [batch]; None: nothing was rotated.
        given: Number of queries of the call, the last tokens if anything was rotated.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    real: Tensor
    positions: Sequence[range]
    turned: Tensor | None
    given: int

    def runs(self) -> Iterator[tuple[Tensor, range]]:
        """Consecutive queries with their positions."""
        # A split has an operator of its own in the backward pass.
        one = len(self.positions) == 1
        parts = (self.q,) if one else self.q.split([len(span) for span in self.positions], dim=2)
        return zip(parts, self.positions, strict=True)

    def counted(self, first: int) -> Tensor:
        """Whether a key belongs to clusters, bool [batch tokens]; the first tokens do not."""
        return self.real & (torch.arange(self.real.shape[1], device=self.real.device) >= first)

    def real_queries(self) -> Tensor:
        """Whether a query is that of a real token, bool [batch queries]."""
        return torch.cat([self.real[:, one.start : one.stop] for one in self.positions], dim=1)

    def restored(self, outs: list[Tensor], *, causal: bool) -> Tensor:
        """Outputs of the queries of the call, from the outputs of `runs`."""
        out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
        if self.turned is None:
            return out
        out = _turn(out, -self.turned)
        if causal:
            # Padding before the first real token was rotated to the end.
            padding = torch.arange(out.shape[2], device=out.device) < self.turned[:, None]
            out = out.masked_fill(padding[:, None, :, None], 0.0)
        return out[:, :, out.shape[2] - self.given :]


def placed_queries(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, positions: Sequence[range] | None
) -> Placed:
    """The queries of a call at their positions, with keys and values in float32 or better.

    Args:
        positions: Positions of consecutive queries, where every first key is real if any is; None: the
            queries are the last tokens.
    """
    k, v = upcast(zero_masked(k, key_mask)), upcast(zero_masked(v, key_mask))
    tokens, given = k.shape[2], q.shape[2]
    last = [range(tokens - given, tokens)]
    if key_mask is None:
        real = torch.ones(k.shape[0], tokens, dtype=torch.bool, device=k.device)
        return Placed(q, k, v, real, positions or last, None, given)
    if positions is not None:
        return Placed(q, k, v, key_mask, positions, None, given)
    # A mask may put the queries anywhere.
    q, turned = F.pad(q, (0, 0, tokens - given, 0)), key_mask.long().argmax(dim=-1)
    q, k, v = (_turn(x, turned) for x in (q, k, v))
    real = _turn(key_mask[:, None, :, None], turned)[:, 0, :, 0]
    return Placed(q, k, v, real, [range(tokens)], turned, given)


def alike(mask: Tensor) -> list[tuple[slice, int]]:
    """Neighbouring batch entries with one first real token, and this token; the number of tokens: none."""
    first = torch.where(mask.any(dim=1), mask.long().argmax(dim=1), mask.shape[1]).tolist()
    found, begin = [], 0
    for start, entries in groupby(first):
        end = begin + len(list(entries))
        found.append((slice(begin, end), start))
        begin = end
    return found


def after(x: Tensor, tokens: int) -> Tensor:
    """`x` after so many empty tokens."""
    return F.pad(x, (0, 0, tokens, 0)) if tokens else x


def without(x: Tensor, tokens: int) -> Tensor:
    """`x` without its first tokens; a slice of all would be an operator of its own in the backward pass."""
    return x[:, :, tokens:] if tokens else x


def _turn(x: Tensor, by: Tensor) -> Tensor:
    """`x` rotated along the tokens: token i of the result is token i + by of x."""
    index = (torch.arange(x.shape[2], device=x.device) + by[:, None]) % x.shape[2]
    return x.gather(2, index[:, None, :, None].expand_as(x))
