"""Cross-attention returns its input, NaN becomes 0, and outputs vanish as q and k grow.

An exponent is clamped to at least −20, and a denominator below 1e-6 is replaced by it. The features of
softmax attention are an option; by default they are elu(x) + 1 of random projections.
"""

import torch
from neuralops.layers.linear.performer_attention import PerformerAttention

torch.manual_seed(0)
x, sizes = torch.randn(1, 16, 64), {"hidden_size": 64, "num_heads": 1}
layer = PerformerAttention(**sizes, kernel_type="favor_plus").eval().requires_grad_(False)
print("cross-attention is its input:", torch.equal(layer(x, encoder_hidden_states=x + 1)[0], x))
layer.query = layer.key = layer.out_proj = torch.nn.Identity()
# Every value is 1.
layer.value = torch.nn.Threshold(torch.inf, 1.0)
for factor in (1, 2, 3, 4):
    print(f"values of 1, q and k of norm {8 * factor}: outputs of {layer(factor * x)[0].mean():.1e}")
layer.value = torch.nn.Identity()
print("all outputs for a token of NaN:", layer(x.index_fill(1, torch.tensor(3), torch.nan))[0].unique())
print("default features:", PerformerAttention(**sizes).kernel_type)
