"""Faults of growth: right outputs that take quadratic time or memory."""

import torch
from twins import with_gradient


def _dense_backward(gradient):
    scores = gradient @ gradient.mT
    return gradient + 0 * scores[..., :1]


class TrainsInQuadraticMemory:
    def forward(self, q, k, v, key_mask):
        return with_gradient(super().forward(q, k, v, key_mask), _dense_backward)


class BuildsAMaskOfAllPairs:
    def forward(self, q, k, v, key_mask):
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        return super().forward(q, k, v, key_mask) * visible[:, :1]


class TakesQuadraticTime:
    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        for row in range(0, k.shape[2], 16):
            out = out + 0 * (k[:, :, row : row + 16] @ k.mT).sum(-1, keepdim=True).sum(2, keepdim=True)
        return out


class BuildsAMaskOfAllPairsBeyond4096:
    """Quadratic memory where no quick check looks."""

    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        if k.shape[2] < 4096:
            return out
        return out * torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)[:, :1]


class BuildsAMaskOfAllPairsInBatches:
    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        if len(q) < 2 or q.shape[1] < 2:
            return out
        return out * torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)[:, :1]
