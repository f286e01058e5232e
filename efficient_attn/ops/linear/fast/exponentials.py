"""Exponential features as powers of two, chunk by chunk and in place.

A power of two is three times as fast as one of e: with w' = w / ln 2, φ_f(x) = 2^(x·w'_f + b'). Batch and
heads of keys are one dimension here, `lists`; exponents are written into buffers that are used again.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.linear.inputs import Tokens
from efficient_attn.ops.linear.state import LOWEST
from efficient_attn.ops.scratch import Rooms

LOG2_E, LN_2 = math.log2(math.e), math.log(2)


def power(exponents: Tensor) -> Tensor:
    """2^exponents in place; 0, like any that is too small to matter and slow to compute with, for −inf."""
    lowest = LOWEST[exponents.dtype] * LOG2_E
    return F.threshold(exponents, lowest, -torch.inf, inplace=True).exp2_()


class Powers:
    """Makes the exponents of queries and keys, and takes derivatives by exponents back to them.

    Args:
        in_turns: Whether exponents of queries and of keys are never wanted at once: they share their room.
    """

    def __init__(self, tokens: Tokens, *, in_turns: bool = False) -> None:
        self.tokens, self.rooms = tokens, Rooms()
        self._names = ("either", "either") if in_turns else ("queries", "keys")
        w = tokens.exponents() * (math.sqrt(abs(tokens.scale)) * LOG2_E)
        self._keys, self.features = tokens.for_lists(w).mT, w.shape[-2]
        self._queries = self._keys if tokens.scale > 0 else -self._keys
        self._constant = -math.log2(self.features) / 2
        self._weights = None
        if tokens.log_weights is not None:
            self._weights = tokens.for_lists(tokens.log_weights.to(w.dtype) * LOG2_E)

    def of_queries(self, rows: Tensor, offset: Tensor | None = None) -> Tensor:
        """Exponents of query rows, plus an offset [lists rows 1], [lists rows features]."""
        out = self.room(self._names[0], rows)
        if offset is None:
            return torch.bmm(rows, self._queries, out=out)
        return torch.baddbmm(offset, rows, self._queries, out=out)

    def of_keys(self, keys: Tensor) -> Tensor:
        """Exponents of keys, whether they are masked or not, [lists positions features]."""
        below = torch.linalg.vector_norm(keys, dim=-1, keepdim=True).square_()
        below.mul_(-abs(self.tokens.scale) / 2 * LOG2_E).add_(self._constant)
        exponents = torch.baddbmm(below, keys, self._keys, out=self.room(self._names[1], keys))
        return exponents if self._weights is None else exponents.add_(self._weights)

    def of_real_keys(self, keys: Tensor, positions: slice) -> Tensor:
        """Exponents of keys, −inf where a key is masked, [lists positions features]."""
        return self.hide_(self.of_keys(keys), positions, -torch.inf)

    def hide_(self, x: Tensor, positions: slice, value: float) -> Tensor:
        """Put a value in place of what belongs to masked keys, [lists positions …]."""
        real = self.tokens.real(positions)
        return x if real is None else x.masked_fill_(~real, value)

    def by_queries(self, by_exponents: Tensor) -> Tensor:
        """Derivative by query rows from that by natural exponents."""
        return torch.bmm(by_exponents, self._queries.mT).mul_(LN_2)

    def by_keys(self, keys: Tensor, by_exponents: Tensor) -> Tensor:
        """Derivative by keys from that by natural exponents."""
        longer = by_exponents.sum(dim=-1, keepdim=True).mul_(-abs(self.tokens.scale))
        return torch.bmm(by_exponents, self._keys.mT).mul_(LN_2).addcmul_(keys, longer)

    def room(self, name: str, rows: Tensor) -> Tensor:
        """Room for one number per row and feature, the same whenever it is asked for."""
        return self.rooms(name, rows, (*rows.shape[:-1], self.features))
