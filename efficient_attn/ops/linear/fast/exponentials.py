"""Exponential features as powers of two, chunk by chunk and in place.

A power of two is three times as fast as one of e: with w' = w / ln 2, φ_f(x) = 2^(x·w'_f + b'). Batch and
heads of keys are one dimension here, `lists`; exponents are written into buffers that are used again.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.linear.inputs import LinearInputs
from efficient_attn.ops.linear.state import LOWEST
from efficient_attn.ops.scratch import Scratch

LOG2_E, LN_2 = math.log2(math.e), math.log(2)


def power(exponents: Tensor) -> Tensor:
    """2^exponents in place; 0, like any that is too small to matter and slow to compute with, for −inf."""
    lowest = LOWEST[exponents.dtype] * LOG2_E
    return F.threshold(exponents, lowest, -torch.inf, inplace=True).exp2_()


class ExpKernel:
    """Makes the exponents of queries and keys, and takes derivatives by exponents back to them.

    Args:
        in_turns: Whether exponents of queries and of keys are never wanted at once: they share their room.
    """

    def __init__(self, inputs: LinearInputs, *, shared_buffer: bool = False) -> None:
        self.inputs, self.scratch = inputs, Scratch()
        self._names = ("either", "either") if shared_buffer else ("queries", "keys")
        w = inputs.exponents() * (math.sqrt(abs(inputs.scale)) * LOG2_E)
        self._keys, self.features = inputs.expand_to_heads(w).mT, w.shape[-2]
        self._queries = self._keys if inputs.scale > 0 else -self._keys
        self._constant = -math.log2(self.features) / 2
        self._weights = None
        if inputs.log_weights is not None:
            self._weights = inputs.expand_to_heads(inputs.log_weights.to(w.dtype) * LOG2_E)

    def query_exponents(self, rows: Tensor, offset: Tensor | None = None) -> Tensor:
        """Exponents of query rows, plus an offset [lists rows 1], [lists rows features]."""
        out = self.buffer(self._names[0], rows)
        if offset is None:
            return torch.bmm(rows, self._queries, out=out)
        return torch.baddbmm(offset, rows, self._queries, out=out)

    def key_exponents(self, keys: Tensor) -> Tensor:
        """Exponents of keys, whether they are masked or not, [lists positions features]."""
        below = torch.linalg.vector_norm(keys, dim=-1, keepdim=True).square_()
        below.mul_(-abs(self.inputs.scale) / 2 * LOG2_E).add_(self._constant)
        exponents = torch.baddbmm(below, keys, self._keys, out=self.buffer(self._names[1], keys))
        return exponents if self._weights is None else exponents.add_(self._weights)

    def real_key_exponents(self, keys: Tensor, positions: slice) -> Tensor:
        """Exponents of keys, −inf where a key is masked, [lists positions features]."""
        return self.fill_masked_(self.key_exponents(keys), positions, -torch.inf)

    def fill_masked_(self, x: Tensor, positions: slice, value: float) -> Tensor:
        """Put a value in place of what belongs to masked keys, [lists positions …]."""
        real = self.inputs.real(positions)
        return x if real is None else x.masked_fill_(~real, value)

    def query_gradient(self, grad_exponents: Tensor) -> Tensor:
        """Derivative by query rows from that by natural exponents."""
        return torch.bmm(grad_exponents, self._queries.mT).mul_(LN_2)

    def key_gradient(self, keys: Tensor, grad_exponents: Tensor) -> Tensor:
        """Derivative by keys from that by natural exponents."""
        longer = grad_exponents.sum(dim=-1, keepdim=True).mul_(-abs(self.inputs.scale))
        return torch.bmm(grad_exponents, self._keys.mT).mul_(LN_2).addcmul_(keys, longer)

    def buffer(self, name: str, rows: Tensor) -> Tensor:
        """Room for one number per row and feature, the same whenever it is asked for."""
        return self.scratch(name, rows, (*rows.shape[:-1], self.features))
