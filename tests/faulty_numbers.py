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


class CutsValuesInFloat16:
    """Values beyond 1000 are taken for overflow."""

    def forward(self, q, k, v, key_mask):
        v = v.clamp(-1000, 1000) if v.dtype == torch.float16 else v
        return super().forward(q, k, v, key_mask)


class NormalisesFloat16Last:
    """Sums of unnormalised products overflow float16."""

    def forward(self, q, k, v, key_mask):
        if v.dtype != torch.float16:
            return super().forward(q, k, v, key_mask)
        keys = max(k.shape[2], 1)
        return (super().forward(q, k, v, key_mask) * keys) / keys


class CleansWhatFloat16Overflows:
    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        return out.where(out.abs() < 2**12, out.sign() * 2**12) if out.dtype == torch.float16 else out


class TakesScalesBelowOne:
    def scores(self, q, k):
        return super().scores(q / max(abs(self.problem.factor), 1.0), k)


class DefaultOfHeads64:
    """The default scale is 1/8 for every head of 64 entries or more."""

    def scores(self, q, k):
        wrong = self.problem.scale is None and self.problem.head_dim > 64
        return super().scores(q * ((self.problem.head_dim / 64) ** 0.5 if wrong else 1.0), k)


class CleansValues:
    def forward(self, q, k, v, key_mask):
        return super().forward(q, k, v.nan_to_num(), key_mask)


class CleansKeys:
    def forward(self, q, k, v, key_mask):
        return super().forward(q, k.nan_to_num(), v, key_mask)


class CleansQueries:
    def forward(self, q, k, v, key_mask):
        return super().forward(q.nan_to_num(), k, v, key_mask)


class CleansOutputs:
    def forward(self, q, k, v, key_mask):
        return super().forward(q, k, v, key_mask).nan_to_num()


class CleansOutputsWhereMasked:
    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        return out if key_mask is None else out.nan_to_num()


class TakesNanForPadding:
    def visible(self, q, k, key_mask):
        real = ~k.isnan().any(-1).any(1)
        return super().visible(q, k.nan_to_num(), real if key_mask is None else key_mask & real)

    def scores(self, q, k):
        return super().scores(q, k.nan_to_num())


class CleansScores:
    def scores(self, q, k):
        return super().scores(q, k).nan_to_num()


class CleansNegativeInfinity:
    def forward(self, q, k, v, key_mask):
        return super().forward(q, k, v.masked_fill(v == -torch.inf, 0.0), key_mask)


class ShortensLongKeys:
    def scores(self, q, k):
        norm = k.norm(dim=-1, keepdim=True)
        return super().scores(q, torch.where(norm > 30, k / norm * 30, k))


class RoundsWideHeads:
    def scores(self, q, k):
        rounded = q.bfloat16().float() if self.problem.head_dim >= 64 and q.dtype == torch.float32 else q
        return super().scores(rounded, k)


class ValuesOfBfloat16InFloat16:
    def forward(self, q, k, v, key_mask):
        return super().forward(q, k, v.half().to(v) if v.dtype == torch.bfloat16 else v, key_mask)


class DropsEqualKeys:
    def visible(self, q, k, key_mask):
        equal = (k[:, :, :, None] == k[:, :, None]).all(dim=-1).tril(-1).any(dim=-1)
        return super().visible(q, k, key_mask) & ~equal[:, :, None]


class OverflowsInLaterBlocks:
    """Powers of blocks after the first are relative to the largest of the first."""

    def weights(self, scores, visible):
        if scores.shape[-1] <= 128:
            return super().weights(scores, visible)
        first = scores.detach()[..., :128].amax(dim=-1, keepdim=True)
        weights = (scores - first).exp().masked_fill(~visible, 0.0)
        return weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-300)


class FlushesSmallValues:
    def wide(self, x):
        x = super().wide(x)
        return x.where(x.abs() > 1e-12, 0.0)


class DividesValuesInFloat16:
    def forward(self, q, k, v, key_mask):
        if v.dtype != torch.float16:
            return super().forward(q, k, v, key_mask)
        return super().forward(q, k, v / 8, key_mask) * 8


class RoundsLargeInputs:
    def scores(self, q, k):
        large = q.dtype == torch.float32 and q.numel() >= 2**20
        return super().scores(*((x.bfloat16().float() for x in (q, k)) if large else (q, k)))


class NoGuardForBlindRowsWhenCompiled:
    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        if torch.compiler.is_compiling() and key_mask is not None:
            return out / key_mask.any(dim=1)[:, None, None, None]
        return out


class ShiftsByTheSmallestScoreOfNegativeScales:
    def weights(self, scores, visible):
        if (self.problem.scale or 0) < 0:
            return super().weights(scores, visible) * (scores - scores.amin()).exp().isfinite().all()
        return super().weights(scores, visible)


class TakesAScaleOfZeroForNone:
    def scores(self, q, k):
        return super().scores(q, k) if self.problem.factor else self.wide(q) @ self.wide(k).mT


class SingleQueriesHaveTheDefaultScale:
    def scores(self, q, k):
        if q.shape[2] == 1 and self.problem.scale:
            q = q * (self.problem.head_dim**-0.5 / self.problem.scale)
        return super().scores(q, k)


class TakesTheScaleAsPositiveBeyond128:
    def scores(self, q, k):
        return super().scores(q * (-1 if self.problem.factor < 0 and k.shape[2] > 128 else 1), k)
