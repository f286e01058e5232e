"""Faults of precision and scale."""

import torch


class ScoresInFloat32:
    def scores(self, q, k):
        return super().scores(q.float(), k.float()).to(self.wide(q).dtype)


class ValuesInFloat32:
    def wide(self, x):
        return super().wide(x.float().to(x.dtype) if x.dtype == torch.float64 else x)


class ScoresInFloat16:
    def scores(self, q, k):
        half = (x.half().to(x.dtype) if x.dtype == torch.float32 else x for x in (q, k))
        return super().scores(*half)


class ValuesInBfloat16:
    def forward(self, q, k, v, key_mask):
        return super().forward(q, k, v.bfloat16().to(v) if v.dtype == torch.float32 else v, key_mask)


class WeightsInFloat16:
    def weights(self, scores, visible):
        weights = super().weights(scores, visible)
        return weights.half().float() if weights.dtype == torch.float32 else weights


class HalfBeyond128:
    def weights(self, scores, visible):
        weights = super().weights(scores, visible)
        long = weights.shape[-1] > 128 and weights.dtype == torch.float32
        return weights.bfloat16().float() if long else weights


class AddsAnEpsilon:
    def weights(self, scores, visible):
        return super().weights(scores, visible) / (1 + 1e-8)


class TakesTheScaleAsPositive:
    def scores(self, q, k):
        return super().scores(q * (1 if self.problem.factor >= 0 else -1), k)


class IgnoresTheScale:
    def scores(self, q, k):
        return super().scores(q * (self.problem.head_dim**-0.5 / (self.problem.factor or 1)), k)
