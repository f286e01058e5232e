"""Exact softmax attention: its definition, the fused kernels, and the keys and values that a stream keeps."""
