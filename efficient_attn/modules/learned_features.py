"""Feature maps with learned parameters."""

import math

import torch
from torch import Tensor, nn

from efficient_attn.ops.dtypes import upcast, zero_masked
from efficient_attn.ops.linear.features import LEARNED_MAPS
from efficient_attn.ops.linear.inputs import LinearInputs
from efficient_attn.problem import AttentionProblem


class LearnedFeatures(nn.Module):
    """Features of Wx + b and −(Wx + b), with one W and b per query head for queries, and others for keys.

    Without `num_heads` all heads share one pair of maps. Grouped key heads are repeated, since every query
    head has a key map of its own. The initial W is the identity, the initial b is 0.

    Attributes:
        query_weight, key_weight: W, [heads head_dim head_dim].
        query_bias, key_bias: b, [heads 1 head_dim].
    """

    query_weight: Tensor
    query_bias: Tensor
    key_weight: Tensor
    key_bias: Tensor

    def __init__(self, problem: AttentionProblem, kind: str) -> None:
        super().__init__()
        self._logarithms = LEARNED_MAPS[kind]
        heads, dim = problem.num_heads or 1, problem.head_dim
        for side in ("query", "key"):
            identity = torch.eye(dim).expand(heads, dim, dim).clone(memory_format=torch.contiguous_format)
            self.register_parameter(f"{side}_weight", nn.Parameter(identity))
            self.register_parameter(f"{side}_bias", nn.Parameter(torch.zeros(heads, 1, dim)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float) -> LinearInputs:
        """Inputs whose queries and keys are the logarithms of their features."""
        factor = math.sqrt(abs(scale))
        rows = upcast(q) * math.copysign(factor, scale)
        # A masked key may be NaN, and would reach the gradient of W as 0 · NaN.
        keys = upcast(zero_masked(k, key_mask)) * factor
        values = upcast(v)
        if len(self.key_weight) > k.shape[1]:
            group = q.shape[1] // k.shape[1]
            keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        log_queries = self._logarithms(rows, self.query_weight.to(rows), self.query_bias.to(rows))
        log_keys = self._logarithms(keys, self.key_weight.to(keys), self.key_bias.to(keys))
        return LinearInputs(log_queries, log_keys, values, key_mask, None, None, "exponential", 1.0)
