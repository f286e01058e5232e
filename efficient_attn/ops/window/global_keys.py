"""Global keys of window attention: the first real keys of each sequence, which every query reads.

A softmax over the global keys outside a row's window is merged with the softmax over the window by their
log-sum-exps. Trained decoders give such keys, their attention sinks, most of the weight (Xiao et al. 2024,
arXiv:2309.17453, section 3).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.dtypes import upcast, zero_masked
from efficient_attn.ops.softmax.fused import fused_attention

# Age of a global key that a sequence does not have; sums with a number of tokens stay below half of it.
ABSENT = -(2**62)


class GlobalKeys(NamedTuple):
    """Global keys of a call, and the rows whose window does not contain them.

    Attributes:
        k: [batch kv_heads count head_dim].
        v: [batch kv_heads count value_dim].
        far: Whether the key is outside the window, bool [batch count rows], for the last queries. Windows of
            earlier rows contain all global keys. None: outside for all queries.
        at: Positions of the global keys among the keys of the call, int64 [batch count]. None: they lie
            outside and have gradients of their own.
    """

    k: Tensor
    v: Tensor
    far: Tensor | None
    at: Tensor | None = None


class WindowInputs(NamedTuple):
    """Inputs of window attention.

    Attributes:
        key_mask: bool [batch k_tokens], True for a real token; None: all real.
        back, ahead: Number of keys before and after its position that a query reads.
        first_k, first_v, far, at: `GlobalKeys`, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    back: int
    ahead: int
    scale: float
    first_k: Tensor | None = None
    first_v: Tensor | None = None
    far: Tensor | None = None
    at: Tensor | None = None


def global_keys_of(inputs: WindowInputs) -> GlobalKeys | None:
    if inputs.first_k is None or inputs.first_v is None:
        return None
    return GlobalKeys(inputs.first_k, inputs.first_v, inputs.far, inputs.at)


class AgedKeys(NamedTuple):
    """Global keys with their ages, the distances from the token after the last.

    Attributes:
        k: [batch kv_heads count head_dim], zero or arbitrary where absent.
        v: [batch kv_heads count value_dim].
        age: int64 [batch count]; ABSENT: no key.
    """

    k: Tensor
    v: Tensor
    age: Tensor
    at: Tensor | None = None

    def seen_by(
        self, q_tokens: int, k_tokens: int, *, back: int, ahead: int, causal: bool
    ) -> GlobalKeys | None:
        """The keys with the rows that read them, or None if all of them are in the windows.

        The queries are the last of the `k_tokens` keys of the call, which older keys may precede.
        """
        start = max(back - (k_tokens - q_tokens), 0) if causal else 0
        if start >= q_tokens:
            return None
        row = torch.arange(q_tokens - start, 0, -1, device=self.age.device)
        age = self.age[..., None]
        far = age > row + back
        if not causal:
            far = far | ((age < row - ahead) & (age > ABSENT // 2))
        return GlobalKeys(self.k, self.v, far, self.at)


def first_keys(k: Tensor, v: Tensor, key_mask: Tensor | None, count: int) -> AgedKeys:
    """The first `count` real keys, or as many as there are tokens."""
    (batch, _, tokens, _), count = k.shape, min(count, k.shape[2])
    number = torch.arange(count, device=k.device).expand(batch, count)
    if key_mask is None:
        return AgedKeys(k[:, :, :count], v[:, :, :count], tokens - number, number)
    at = (key_mask.cumsum(dim=-1)[:, None] <= number[..., None]).sum(dim=-1)
    age = torch.where(at < k.shape[2], k.shape[2] - at, ABSENT)
    # An absent key is represented by the last token, which no row reads as a global key.
    at = at.clamp(max=k.shape[2] - 1)
    keys, values = (tokens_at(zero_masked(x, key_mask), at) for x in (k, v))
    return AgedKeys(keys, values, age, at)


def tokens_at(x: Tensor, at: Tensor) -> Tensor:
    """Keys or values [batch kv_heads tokens dim] at positions [batch count]."""
    return x.gather(2, _index(at, x))


def _index(at: Tensor, x: Tensor) -> Tensor:
    return at[:, None, :, None].expand(*x.shape[:2], -1, x.shape[3])


def attend_one(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: GlobalKeys, scale: float
) -> Tensor:
    """Attention of the last query to its window, which holds all of k, and to the global keys outside it."""
    keys = torch.cat([first.k, zero_masked(k, key_mask)], dim=2)
    values = torch.cat([first.v, zero_masked(v, key_mask)], dim=2)
    visible = None
    if first.far is not None or key_mask is not None:
        shape = (k.shape[0], first.k.shape[2]), (k.shape[0], k.shape[2])
        far = k.new_ones(shape[0], dtype=torch.bool) if first.far is None else first.far[..., -1]
        real = k.new_ones(shape[1], dtype=torch.bool) if key_mask is None else key_mask
        visible = torch.cat([far, real], dim=1)
    return fused_attention(q, keys, values, scale=scale, key_mask=visible, dropout=0.0, zeroed=True)


def merge(inputs: WindowInputs, first: GlobalKeys, out: Tensor, log_sum: Tensor) -> None:
    """Add the global keys to the window's output and log-sum-exps, in float32 or better, in place."""
    q, _, _, key_mask, back, ahead, scale = inputs[:7]
    rows, hidden = _rows(q, first)
    if key_mask is not None:
        # Rows whose window has no real key.
        tokens, count = key_mask.shape[1], F.pad(key_mask.cumsum(dim=-1), (1, 0))
        row = torch.arange(tokens - q.shape[2], tokens, device=key_mask.device)[rows]
        empty = count[:, (row + ahead + 1).clamp(max=tokens)] == count[:, (row - back).clamp(min=0)]
        log_sum[:, :, rows].masked_fill_(empty[:, None], -torch.inf)
    group = q.shape[1] // first.k.shape[1]
    for entry in range(q.shape[0]):
        keys, values = (upcast(x[entry]).repeat_interleave(group, dim=0) for x in (first.k, first.v))
        scores = torch.bmm(keys * scale, upcast(q[entry, :, rows]).mT)
        if hidden is not None:
            scores.masked_fill_(hidden[entry], -torch.inf)
        near = log_sum[entry, :, rows]
        both = torch.logaddexp(near, scores.logsumexp(dim=1))
        # A row without any real key: exp(−inf) = 0, where −inf less −inf would be NaN.
        both.masked_fill_(both == -torch.inf, 0.0)
        outs = out[entry, :, rows].mul_((near - both).exp_().unsqueeze(-1))
        outs.baddbmm_(scores.sub_(both.unsqueeze(1)).exp_().mT, values)
        near.copy_(both)


def _rows(q: Tensor, first: GlobalKeys) -> tuple[slice, Tensor | None]:
    """Queries with global keys outside their window, and the pairs to hide."""
    if first.far is None:
        return slice(None), None
    return slice(q.shape[2] - first.far.shape[2], None), ~first.far


def add_gradients(
    q: Tensor, first: GlobalKeys, scale: float, results: tuple[Tensor, Tensor, Tensor], into: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Add gradients through global keys. Return the gradients of global keys outside of the call.

    Args:
        results: Output gradient, merged output and its log-sum-exps.
        into: Gradients of q, k and v.
    """
    (grad_out, out, log_sum), (grad_q, grad_k, grad_v) = results, into
    rows, hidden = _rows(q, first)
    group = q.shape[1] // first.k.shape[1]
    first_k, first_v = (x.new_zeros(x.shape, dtype=grad_q.dtype) for x in (first.k, first.v))
    for entry in range(q.shape[0]):
        for head in range(q.shape[1]):
            number = head // group
            keys, values = (upcast(x[entry, number]) for x in (first.k, first.v))
            queries, grads, outs = (upcast(x[entry, head, rows]) for x in (q, grad_out, out))
            scores = torch.mm(keys, queries.mT).mul_(scale)
            if hidden is not None:
                scores.masked_fill_(hidden[entry], -torch.inf)
            weights = scores.sub_(log_sum[entry, head, rows]).exp_()
            by_score = torch.mm(values, grads.mT).sub_((grads * outs).sum(dim=-1)).mul_(weights).mul_(scale)
            grad_q[entry, head, rows].addmm_(by_score.mT, keys)
            first_k[entry, number].addmm_(by_score, queries)
            first_v[entry, number].addmm_(weights, grads)
    if first.at is None:
        return first_k, first_v
    for whole, part in ((grad_k, first_k), (grad_v, first_v)):
        whole.scatter_add_(2, _index(first.at, whole), part)
    return q.new_empty(0), q.new_empty(0)
