"""The output of a sequence depends on the others of its batch, and the option against it raises."""

import torch
from transformers.models.nystromformer.modeling_nystromformer import (
    NystromformerConfig,
    NystromformerSelfAttention,
)

torch.manual_seed(0)
layer = (
    NystromformerSelfAttention(NystromformerConfig(segment_means_seq_len=256)).eval().requires_grad_(False)
)
x = torch.randn(2, 256, 768)
alone, together = layer(x[:1])[0][0], layer(torch.stack([x[0], 100 * x[1]]))[0][0]
print(f"relative difference: {(together - alone).norm() / alone.norm():.1e}")
try:
    NystromformerSelfAttention(NystromformerConfig(inv_coeff_init_option=True))
except TypeError as error:
    print("inv_coeff_init_option=True:", error)
