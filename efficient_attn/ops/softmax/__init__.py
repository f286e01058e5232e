"""Exact softmax attention: its definition, the fused kernels, and the keys and values that a stream keeps."""

from efficient_attn.ops.softmax.definition import softmax_attention as softmax_attention
