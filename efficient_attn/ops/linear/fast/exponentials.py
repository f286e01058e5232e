"""Exponential features as powers of two, chunk by chunk and in place.

PyTorch computes powers of two three times as fast as powers of e: with w' = w / ln 2,
φ_f(x) = 2^(x·w'_f + b'). Batch and key heads form one dimension, `flat_heads`; exponents are written into
scratch buffers.
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
    """2^exponents in place, with results below `LOWEST` flushed to zero."""
    lowest = LOWEST[exponents.dtype] * LOG2_E
    return F.threshold(exponents, lowest, -torch.inf, inplace=True).exp2_()


class ExpKernel:
    """Exponents of queries and keys, and the pullback of gradients through them.

    Args:
        shared_buffer: Whether one buffer serves the exponents of queries and of keys, never needed together.
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
        """Exponents of query rows, plus an offset [flat_heads rows 1], [flat_heads rows features]."""
        out = self.buffer(self._names[0], rows)
        if offset is None:
            return torch.bmm(rows, self._queries, out=out)
        return torch.baddbmm(offset, rows, self._queries, out=out)

    def key_exponents(self, keys: Tensor) -> Tensor:
        """Exponents of all keys, masked or not, [flat_heads positions features]."""
        below = torch.linalg.vector_norm(keys, dim=-1, keepdim=True).square_()
        below.mul_(-abs(self.inputs.scale) / 2 * LOG2_E).add_(self._constant)
        exponents = torch.baddbmm(below, keys, self._keys, out=self.buffer(self._names[1], keys))
        return exponents if self._weights is None else exponents.add_(self._weights)

    def real_key_exponents(self, keys: Tensor, positions: slice) -> Tensor:
        """Exponents of keys, −inf for masked keys, [flat_heads positions features]."""
        return self.fill_masked_(self.key_exponents(keys), positions, -torch.inf)

    def fill_masked_(self, x: Tensor, positions: slice, value: float) -> Tensor:
        """Fill the rows of masked keys with a value, [flat_heads positions …]."""
        real = self.inputs.real(positions)
        return x if real is None else x.masked_fill_(~real, value)

    def query_gradient(self, grad_exponents: Tensor) -> Tensor:
        """Gradient with respect to query rows, from the gradient of the natural exponents."""
        return torch.bmm(grad_exponents, self._queries.mT).mul_(LN_2)

    def key_gradient(self, keys: Tensor, grad_exponents: Tensor) -> Tensor:
        """Gradient with respect to keys, from the gradient of the natural exponents."""
        longer = grad_exponents.sum(dim=-1, keepdim=True).mul_(-abs(self.inputs.scale))
        return torch.bmm(grad_exponents, self._keys.mT).mul_(LN_2).addcmul_(keys, longer)

    def buffer(self, name: str, rows: Tensor) -> Tensor:
        """Scratch buffer of one number per row and feature."""
        return self.scratch(name, rows, (*rows.shape[:-1], self.features))
