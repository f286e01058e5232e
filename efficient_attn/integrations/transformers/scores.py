"""Attention with changed scores: a learned sink for each head, and soft caps."""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from efficient_attn.backend import Backend
from efficient_attn.ops.dtypes import upcast, zero_masked
from efficient_attn.ops.grouped_queries import fold, unfold
from efficient_attn.ops.softmax.definition import softmax_over
from efficient_attn.ops.softmax.kv_cache import KVCache, append_tokens, last_tokens, mask_of

# Columns of queries and keys for the score of a sink. Kernels of accelerators require a multiple of 8.
SINK_DIM = 8
# Queries whose capped scores are in memory at once.
_QUERIES = 128


class SinkAttention(NamedTuple):
    """Attention with a sink for each head: a first token of value 0 and of a learned score.

    The key of the sink is a unit vector in a column of its own, where queries have the score and keys 0.

    Attributes:
        backend: Backend of head_dim + SINK_DIM.
        sinks: Scores, [heads].
    """

    backend: Backend
    sinks: Tensor

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        # With a query for the sink, a causal call stays square, for which kernels need no mask.
        square = int(q.shape[2] == k.shape[2])
        tensors, mask = self._add_sink(q, k, v, key_mask, queries=square, keys=1)
        return self.backend(*tensors, key_mask=mask)[:, :, square:, : v.shape[3]]

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any = None, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        first = int(state is None)
        tensors, mask = self._add_sink(q, k, v, key_mask, queries=first, keys=first)
        out, state = self.backend.extend(*tensors, state, key_mask=mask)
        return out[:, :, first:, : v.shape[3]], state

    def _add_sink(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, queries: int, keys: int
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
        """Wider q, k and v, with a first query and a first key or without, and the key mask."""
        scores = (self.sinks / self.backend.problem.factor).to(q.dtype)
        scores = scores[:, None, None].expand(*q.shape[:3], 1)
        wide_q = F.pad(torch.cat([q, scores], dim=3), (0, SINK_DIM - 1, queries, 0))
        wide_k, wide_v = (F.pad(x, (0, SINK_DIM, keys, 0)) for x in (k, v))
        wide_k[:, :, :keys, k.shape[3]] = 1
        mask = None if key_mask is None else F.pad(key_mask, (keys, 0), value=True)
        return (wide_q, wide_k, wide_v), mask


class CappedAttention(NamedTuple):
    """Softmax of cap · tanh(score / cap) over the keys that the backend reads.

    The backend is `exact`, `window`, or `by-head` of these. Scores are computed in blocks of queries, and
    again in the backward pass.
    """

    backend: Backend
    cap: float

    @property
    def back(self) -> int | None:
        """Number of earlier keys that a query reads. None: no limit."""
        options: Any = self.backend.options
        return options.window - 1 if getattr(options, "global_tokens", None) == 0 else None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = zero_masked(k, key_mask), zero_masked(v, key_mask)
        attend = self._attend
        if torch.is_grad_enabled():
            attend = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
        blocks = (slice(start, start + _QUERIES) for start in range(0, q.shape[2], _QUERIES))
        return torch.cat([attend(q, k, v, key_mask, rows) for rows in blocks], dim=2)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: KVCache | None = None, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, KVCache]:
        cache = append_tokens(state, k, v, key_mask)
        after = cache if self.back is None else last_tokens(cache, self.back)
        return self(q, cache.k, cache.v, key_mask=mask_of(cache)), after

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, rows: slice) -> Tensor:
        queries, read = q[:, :, rows], slice(None)
        if self.backend.problem.causal:
            past = k.shape[2] - q.shape[2]
            first = 0 if self.back is None else max(rows.start + past - self.back, 0)
            q, read, rows = queries, slice(first, rows.stop + past), slice(None)
        k, v, mask = k[:, :, read], v[:, :, read], None if key_mask is None else key_mask[:, read]
        visible = self.backend.keys_read(q, k, key_mask=mask, rows=rows)
        scores = upcast(unfold(fold(queries, k.shape[1]) @ k.mT, q.shape[1]))
        scores = self.cap * (scores * (self.backend.problem.factor / self.cap)).tanh()
        # Weights have the dtype of the values, as in transformers' own code.
        weights = softmax_over(scores, visible).to(v.dtype)
        return unfold(fold(weights, v.shape[1]) @ v, q.shape[1])
