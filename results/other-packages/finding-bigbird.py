"""In evaluation every random block is block 0, whose keys count four times. Its weights do not show it."""

import torch
from transformers.models.big_bird.modeling_big_bird import (
    BigBirdBlockSparseAttention,
    BigBirdConfig,
    BigBirdModel,
)

layer = BigBirdBlockSparseAttention(BigBirdConfig(hidden_size=64, num_attention_heads=1, block_size=4)).eval()
# Every query is 0.
layer.query, layer.value = torch.nn.Threshold(torch.inf, 0.0), torch.nn.Identity()
blocks, band, rows, columns = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(1, 64), 4)
out, weights = layer(torch.eye(64)[None], band, rows, columns, blocks, blocks)
print("query 32, equal scores, weights of 16 blocks of keys:", out[0, 32].view(16, 4).sum(-1).tolist())
print("the weights that it returns:", weights[0, 0, 32].view(16, 4).sum(-1).tolist())
