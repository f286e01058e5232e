"""Models for tests of models of the user's own, copied as models.py: functions that make them or fail."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Size:
    dim: int = 16


class Attention(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.causal, self.projection, self.dropout = causal, nn.Linear(Size().dim, 48), nn.Dropout(0.5)

    def forward(self, x, real=None):
        q, k, v = self.projection(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mask = None if self.causal or real is None else real[:, None, None]
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)
        return x + self.dropout(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.masked, self.causal = Attention(False), Attention(True)

    def forward(self, x, real):
        return self.causal(self.masked(x, real), real)


def make_pair():
    print("a model is made")
    real = torch.ones(1, 12, dtype=torch.bool)
    real[0, 9:] = False
    return Model(), {"x": 2 * torch.randn(1, 12, 16), "real": real}


class Pipeline(nn.Module):
    def __init__(self, call, model=None):
        super().__init__()
        self.call, self.model = call, model

    def forward(self):
        return self.call()


def make_pipeline():
    model, inputs = make_pair()

    def run():
        inner = model(**inputs) + 0.1 * torch.randn(1, 12, 16)
        q = inner[:, None]
        biased = F.scaled_dot_product_attention(q, q, q, torch.rand(12, 12))
        return {"pair": (biased, [model.causal(inner, None)]), "ids": torch.arange(3)}

    return Pipeline(run, model), ()


def attention(k_tokens=12):
    q, k = torch.randn(1, 2, 12, 8), torch.randn(1, 2, k_tokens, 8)
    return F.scaled_dot_product_attention(q, k, k)


def make_cross():
    return Pipeline(lambda: attention(5)), ()


def make_infinite():
    return Pipeline(lambda: attention() / 0), ()


def make_text():
    return Pipeline(lambda: str(attention())), ()


def make_counted():
    return Pipeline(lambda: attention() + next(counter)), ()


def make_error():
    raise ValueError("no weights\nhere")


def make_without_attention():
    return nn.Linear(2, 2), (torch.ones(1, 2),)


counter = iter(range(99))


def two_layers():
    return nn.Sequential(Attention(False), Attention(False)).eval()


def make_drawn():
    return two_layers(), (2 * torch.randn(1, 20, 16),)


def make_same():
    return two_layers(), (torch.linspace(-2, 2, 160).reshape(1, 10, 16).sin(),)
