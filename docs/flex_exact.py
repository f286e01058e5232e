"""Exact attention by PyTorch's FlexAttention, a baseline: `--backend docs/flex_exact.py:flex`."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import BackendSpec, Capabilities, NoOptions


class Flex(nn.Module):
    """Compiled FlexAttention, full or causal."""

    def __init__(self, problem: AttentionProblem, options: NoOptions) -> None:
        super().__init__()
        self._scale, self._causal = problem.factor, problem.causal
        # Uncompiled FlexAttention would write all scores.
        self._attend = torch.compile(flex_attention, fullgraph=True, dynamic=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        mask = causal_blocks(q.shape[-2], k.shape[-2], str(q.device)) if self._causal else None
        return self._attend(q, k, v, block_mask=mask, scale=self._scale, enable_gqa=q.shape[1] != k.shape[1])


@cache
def causal_blocks(q_tokens: int, k_tokens: int, device: str) -> BlockMask:
    """Blocks of the causal mask, found once for all calls; the queries are the last positions."""

    def visible(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        return key <= query + (k_tokens - q_tokens)

    return create_block_mask(visible, None, None, q_tokens, k_tokens, device=device)


flex = BackendSpec(
    name="flex",
    summary="Exact attention by FlexAttention.",
    options_type=NoOptions,
    capabilities=Capabilities(
        causal=True, streaming=False, key_mask=False, exact=True, compile=False, time_growth=2
    ),
    builder=Flex,
)
