"""Models of torch's layers and of one's own that call F.scaled_dot_product_attention, for interception."""

import torch
import torch.nn.functional as F
from torch import nn

HEADS, HEAD_DIM, TOKENS = 4, 8, 12
DIM = HEADS * HEAD_DIM


class OwnAttention(nn.Module):
    """Attention as people write it: one projection, causal or by mask."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.projection, self.dropout = nn.Linear(DIM, 3 * DIM), dropout

    def forward(self, x, mask=None):
        q, k, v = self.projection(x).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout, is_causal=mask is None)
        return x + y.transpose(1, 2).flatten(2)


class OwnModel(nn.Module):
    def __init__(self, layers=2, **options):
        super().__init__()
        self.layers = nn.ModuleList(OwnAttention(**options) for _ in range(layers))

    def forward(self, x, mask=None):
        for layer in self.layers:
            x = layer(x, mask)
        return x


class Called(nn.Module):
    """One call of attention with the arguments of the forward."""

    def __init__(self, **defaults):
        super().__init__()
        self.defaults = defaults

    def forward(self, q, k, v, **options):
        return F.scaled_dot_product_attention(q, k, v, **{**self.defaults, **options})


def encoder():
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 2 * DIM, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def written_model():
    torch.manual_seed(0)
    model, x = OwnModel().eval(), torch.randn(2, TOKENS, DIM)
    return model, lambda: model(x)


def padded_encoder():
    torch.manual_seed(0)
    model, x = encoder().eval(), torch.randn(2, TOKENS, DIM)
    return model, lambda: model(x, src_key_padding_mask=~REAL).masked_fill(~REAL[..., None], 0.0)


def translation():
    torch.manual_seed(0)
    model = nn.Transformer(DIM, HEADS, 1, 2, 2 * DIM, batch_first=True, dropout=0.0).eval()
    source, target = torch.randn(2, TOKENS, DIM), torch.randn(2, 7, DIM)
    later = nn.Transformer.generate_square_subsequent_mask(7)
    return model, lambda: model(source, target, tgt_mask=later, tgt_is_causal=True)


MODELS = (written_model, padded_encoder, translation)
TRIANGLE = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
REAL = torch.ones(2, TOKENS, dtype=torch.bool)
REAL[0, 9:] = False
LEFT = REAL.flip(1)
