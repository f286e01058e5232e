"""Exact softmax attention: definition, fused kernels and KV cache."""

from efficient_attn.ops.softmax.definition import softmax_attention as softmax_attention
