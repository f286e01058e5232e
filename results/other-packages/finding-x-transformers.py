"""Grouped queries: head i reads the keys of head i mod 2, where torch and Llama read those of i // 2.

A causal row without a visible key is the mean of all values, later ones too, and NaN in float64.
"""

import torch
from x_transformers.attend import Attend

q, k = torch.zeros(1, 4, 1, 8), torch.zeros(1, 2, 1, 8)
v = torch.tensor([10.0, 20.0]).view(1, 2, 1, 1).expand(1, 2, 1, 8)
print("x-transformers", Attend()(q, k, v)[0][0, :, 0, 0].tolist())
out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
print("torch         ", out[0, :, 0, 0].tolist())
x, mask = torch.tensor([10.0, 20.0]).view(1, 1, 2, 1), torch.tensor([[False, True]])
for inputs in (x, x.double()):
    print(
        "left padding",
        inputs.dtype,
        Attend(causal=True)(inputs, inputs, inputs, mask=mask)[0].flatten().tolist(),
    )
