"""The weights of a row sum to 1/√dim where attention is not causal, and to 1 where it is."""

import torch
from linear_attention_transformer.linear_attention_transformer import causal_linear_attn, linear_attn

torch.manual_seed(0)
q, k, ones = torch.randn(1, 1, 64, 16), torch.randn(1, 1, 64, 16), torch.ones(1, 1, 64, 16)
print("full  ", linear_attn(q, k, ones)[0, 0, -1, 0].item())
print("causal", causal_linear_attn(q, k, ones, bucket_size=1)[0, 0, -1, 0].item())
