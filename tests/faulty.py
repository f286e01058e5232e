"""Single faults that fit any attention of the twins: each replaces one step and hands the rest on."""

import warnings

import torch
from torch import nn
from twins import Softmax


class Kernel(Softmax):
    """Attention by a positive kernel, 1 + softplus(scale · q·k): right, and not softmax attention."""

    def scores(self, q, k):
        return nn.functional.softplus(super().scores(q, k)).log1p()


class Tempered(Softmax):
    """With a learned factor on the scores."""

    def __init__(self, problem, options):
        super().__init__(problem, options)
        self.factor = nn.Parameter(torch.ones((), dtype=torch.float32))

    def scores(self, q, k):
        return super().scores(q, k) * self.factor


class LinearMemory(Softmax):
    """Exact attention by torch's fused kernel, for two whole sequences without causality."""

    def forward(self, q, k, v, key_mask):
        return nn.functional.scaled_dot_product_attention(q, k, v, scale=self.problem.factor, enable_gqa=True)


# Batches, heads, columns ------------------------------------------------------------------------------


class ThirdSequenceReadsTheSecond:
    def scores(self, q, k):
        return super().scores(q, torch.cat([k[:2], k[1:2].expand_as(k[2:])]) if len(k) > 2 else k)


class FourthSequenceHasTheMaskOfTheFirst:
    def visible(self, q, k, key_mask):
        if key_mask is not None and len(key_mask) == 4:
            key_mask = torch.cat([key_mask[:3], key_mask[:1]])
        return super().visible(q, k, key_mask)


class LaterHeadsAreSharper:
    def scores(self, q, k):
        scores = super().scores(q, k)
        return torch.cat([scores[:, :4], scores[:, 4:] * 1.01], 1)


class ThreeGroupsInTurn:
    def for_every_head(self, x, heads):
        if x.shape[1] == 3:
            return x.repeat(1, heads // 3, 1, 1)
        return super().for_every_head(x, heads)


class ScalesByTheValues:
    def forward(self, q, k, v, key_mask):
        return super().forward(q * (self.problem.head_dim / v.shape[-1]) ** 0.5, k, v, key_mask)


class WideValuesAreCut:
    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        beyond = torch.arange(v.shape[-1]) >= q.shape[-1]
        return out.masked_fill(beyond, 0.0) if len(q) > 1 else out


# Lengths and masks ------------------------------------------------------------------------------------


class BeyondFlatter:
    """Longer sequences have another temperature."""

    at = 200

    def scores(self, q, k):
        return super().scores(q, k) * (0.99 if k.shape[2] > self.at else 1.0)


class BeyondFlatter500(BeyondFlatter):
    at = 500


class DropsThePartialBlock:
    def visible(self, q, k, key_mask):
        visible, keys = super().visible(q, k, key_mask), k.shape[2]
        whole = keys - keys % 128 if keys > 128 else keys
        return visible & (torch.arange(keys) < whole)


class DropsTheLastKeyOfFullBlocks:
    def visible(self, q, k, key_mask):
        visible, keys = super().visible(q, k, key_mask), k.shape[2]
        return visible & (torch.arange(keys) < keys - (keys % 64 == 0))


class ForgetsBeyond256:
    """A causal query reads 256 keys, whatever came before."""

    def visible(self, q, k, key_mask):
        visible = super().visible(q, k, key_mask)
        if not self.problem.causal:
            return visible
        return visible & torch.ones_like(visible).triu(k.shape[2] - q.shape[2] - 255)


class FirstRowIsOff:
    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        return torch.cat([out[:, :, :1] * (1.001 if q.shape[2] > 9 else 1), out[:, :, 1:]], 2)


class LastRowIsOff:
    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        return torch.cat([out[:, :, :-1], out[:, :, -1:] * (1.001 if q.shape[2] > 9 else 1)], 2)


class IgnoresMasksInCrossAttention:
    def visible(self, q, k, key_mask):
        return super().visible(q, k, key_mask if q.shape[2] == k.shape[2] else None)


class IgnoresMasksWhereCausal:
    def visible(self, q, k, key_mask):
        return super().visible(q, k, None if self.problem.causal and k.shape[2] > 65 else key_mask)


class MultipliesLongMasks:
    def hidden(self, x, key_mask):
        return super().hidden(x, key_mask if x.shape[2] <= 128 else None)


class ReadsMasksFromMemory:
    def visible(self, q, k, key_mask):
        if key_mask is not None:
            rows, columns = key_mask.shape
            key_mask = (
                key_mask.as_strided((rows, columns), (columns, 1)) if key_mask.stride()[0] else key_mask
            )
        return super().visible(q, k, key_mask)


class MasksOfTrueHideTheLast:
    def visible(self, q, k, key_mask):
        if key_mask is not None and key_mask.all() and k.shape[2] > 1:
            key_mask = key_mask & (torch.arange(k.shape[2]) < k.shape[2] - 1)
        return super().visible(q, k, key_mask)


# Numbers ----------------------------------------------------------------------------------------------


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


# Gradients --------------------------------------------------------------------------------------------


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class DetachesLongKeys:
    def scores(self, q, k):
        return super().scores(q, k.detach() if k.shape[2] > 128 else k)


class HalvesTheGradientOfOtherValues:
    def forward(self, q, k, v, key_mask):
        v = _Scaled.apply(v, 0.5) if v.shape[-1] != q.shape[-1] else v
        return super().forward(q, k, v, key_mask)


class WrongWhereAllAsk:
    def forward(self, q, k, v, key_mask):
        q = _Scaled.apply(q, 1.01) if q.requires_grad and k.requires_grad and v.requires_grad else q
        return super().forward(q, k, v, key_mask)


class WrongWhereQueriesAreFrozen:
    def forward(self, q, k, v, key_mask):
        return super().forward(q, k if q.requires_grad else _Scaled.apply(k, 0.9), v, key_mask)


class NoGradientInLongFloat32:
    def forward(self, q, k, v, key_mask):
        q = q.detach() if q.dtype == torch.float32 and q.shape[2] > 64 and k.requires_grad else q
        return super().forward(q, k, v, key_mask)


class WrongGradientWhereMaskedAndCausal:
    def forward(self, q, k, v, key_mask):
        k = _Scaled.apply(k, 0.9) if key_mask is not None and self.problem.causal and len(k) > 1 else k
        return super().forward(q, k, v, key_mask)


class WrongGradientInGroups:
    def for_every_head(self, x, heads):
        return super().for_every_head(_Scaled.apply(x, 0.5) if x.shape[1] < heads else x, heads)


class _Overwrites(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        given = gradient.clone()
        gradient.mul_(2.0)
        return given


class WritesToWhatFlowsBack:
    def forward(self, q, k, v, key_mask):
        return _Overwrites.apply(super().forward(q, k, v, key_mask))


class _FromMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        if 0 in gradient.stride():
            return gradient
        return (
            torch.empty_like(gradient)
            .contiguous()
            .as_strided_(gradient.shape, gradient.stride())
            .copy_(gradient)
            if gradient.is_contiguous()
            else gradient.as_strided(gradient.shape, gradient.contiguous().stride())
        )


class ReadsGradientsFromMemory:
    def forward(self, q, k, v, key_mask):
        return _FromMemory.apply(super().forward(q, k, v, key_mask))


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.passes = 0
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.passes += 1
        return gradient * ctx.passes


class AnotherGradientTheSecondTime:
    def forward(self, q, k, v, key_mask):
        return _Once.apply(super().forward(q, k, v, key_mask))


class TrainsOnSomethingElse:
    def weights(self, scores, visible):
        return super().weights(scores * 1.001 if self.training else scores, visible)


# Memory of inputs, outputs, calls ---------------------------------------------------------------------


class WritesToLongKeys:
    def forward(self, q, k, v, key_mask):
        if k.shape[2] > 128:
            k.detach().add_(1.0)
        return super().forward(q, k, v, key_mask)


class WritesToTheMask:
    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        if key_mask is not None:
            key_mask[:, -1] = True
        return out


class HandsOutSingleValues:
    def forward(self, q, k, v, key_mask):
        alone = k.shape[2] == 1 and q.shape == v.shape and key_mask is None
        return v if alone else super().forward(q, k, v, key_mask)


class ReusesItsOutput:
    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        if torch.is_grad_enabled() and out.requires_grad:
            return out
        kept = getattr(self, "kept", None)
        if kept is None or kept.shape != out.shape or kept.dtype != out.dtype or kept.is_inference():
            self.kept = out.detach()
        else:
            kept.copy_(out)
        return self.kept


class KeepsMasksByShape:
    def visible(self, q, k, key_mask):
        kept = self.__dict__.setdefault("kept", {})
        key = (q.shape[2], k.shape[2], None if key_mask is None else key_mask.shape)
        if key not in kept:
            kept[key] = super().visible(q, k, key_mask)
        return kept[key]


class KeepsMasksByQueries:
    """Later keys than those of the first call with as many queries stay hidden."""

    def visible(self, q, k, key_mask):
        kept = self.__dict__.setdefault("kept", {})
        visible = super().visible(q, k, key_mask)
        first = kept.setdefault(q.shape[2], k.shape[2])
        return visible & (torch.arange(k.shape[2]) < first)


class KeepsOutputsByAddress:
    def forward(self, q, k, v, key_mask):
        kept = self.__dict__.setdefault("kept", {})
        key = tuple((x.data_ptr(), x.shape) for x in (q, k, v) if x.numel())
        if torch.is_grad_enabled() and q.requires_grad:
            return super().forward(q, k, v, key_mask)
        if key not in kept:
            kept[key] = (super().forward(q, k, v, key_mask), q, k, v)
        return kept[key][0].clone()


class ChangesAfterSixtyCalls:
    def scores(self, q, k):
        self.calls = getattr(self, "calls", 0) + 1
        return super().scores(q, k) * (1.01 if self.calls > 60 else 1.0)


class KeepsWhatInferenceModeMade:
    def scores(self, q, k):
        if not hasattr(self, "one"):
            self.one = q.new_ones(q.shape[-1])
        return super().scores(q * self.one.to(q), k)


class KeepsItsFirstFactor:
    """A parameter is read once; what an optimiser makes of it is not seen."""

    def scores(self, q, k):
        if self.factor.requires_grad and torch.is_grad_enabled():
            return super().scores(q, k)
        if not hasattr(self, "kept"):
            self.kept = self.factor.detach().clone()
        return Softmax.scores(self, q, k) * self.kept


class DetachesItsFactor:
    def scores(self, q, k):
        return Softmax.scores(self, q, k) * self.factor.detach()


class FactorIsNoParameter:
    def __init__(self, problem, options):
        super().__init__(problem, options)
        self.other = [torch.ones((), dtype=torch.float64, requires_grad=True)]

    def scores(self, q, k):
        return super().scores(q, k) * self.other[0].to(q.dtype)


# Streaming --------------------------------------------------------------------------------------------


class KeepsTheCallersBuffers:
    def extend(self, q, k, v, state, key_mask):
        out, kept = super().extend(q, k, v, state, key_mask)
        return out, (k, v, kept[2]) if state is None else kept


class WritesToItsState:
    def extend(self, q, k, v, state, key_mask):
        out, kept = super().extend(q, k, v, state, key_mask)
        if state is not None and k.shape[2]:
            state[1][:, :, :1].mul_(1.5)
        return out, kept


class TruncatesLongStates:
    most = 256

    def extend(self, q, k, v, state, key_mask):
        out, (keys, values, mask) = super().extend(q, k, v, state, key_mask)
        return out, (keys[:, :, -self.most :], values[:, :, -self.most :], mask[:, -self.most :])


class TruncatesStates(TruncatesLongStates):
    most = 64


class NoTokensEndTheState:
    def extend(self, q, k, v, state, key_mask):
        return super().extend(q, k, v, None if not q.shape[2] else state, key_mask)


class ForgetsTheMaskLater:
    def extend(self, q, k, v, state, key_mask):
        return super().extend(q, k, v, state, key_mask if state is None else None)


class ReadsAheadWhenExtending:
    def extend(self, q, k, v, state, key_mask):
        out, kept = super().extend(q, k, v, state, key_mask)
        return (out.flip(2).cummax(2).values.flip(2) if q.shape[2] > 1 and state is not None else out), kept


class StatesInHalfPrecision:
    def extend(self, q, k, v, state, key_mask):
        out, (keys, values, mask) = super().extend(q, k, v, state, key_mask)
        return out, (keys, values.half().to(values), mask)


class DetachesItsState:
    def extend(self, q, k, v, state, key_mask):
        out, kept = super().extend(q, k, v, state, key_mask)
        return out, tuple(x.detach() for x in kept)


class GroupsWrongWhenExtending:
    def extend(self, q, k, v, state, key_mask):
        if k.shape[1] < q.shape[1] and state is not None and k.shape[1] > 1:
            k = k.flip(1)
        return super().extend(q, k, v, state, key_mask)


class ReusesItsOutputWhenExtending:
    def extend(self, q, k, v, state, key_mask):
        out, kept = super().extend(q, k, v, state, key_mask)
        if out.requires_grad or out.shape[2] != 1:
            return out, kept
        self.kept = self.__dict__.get("kept", out)
        if self.kept.shape == out.shape and self.kept.dtype == out.dtype:
            return self.kept.copy_(out), kept
        return out, kept


# Settings ---------------------------------------------------------------------------------------------


class ComputesInTheDefaultDtype:
    def scores(self, q, k):
        return super().scores(q, k) * torch.tensor(1.1, dtype=torch.get_default_dtype()).to(q.dtype)


class SeedsFromTheGlobalGenerator:
    def scores(self, q, k):
        return super().scores(q, k) * (1 + torch.initial_seed() % 7 * 1e-3)


class DropsOutInTraining:
    def weights(self, scores, visible):
        weights = super().weights(scores, visible)
        long = weights.shape[-1] > 100
        if not (self.training and long):
            return weights
        with torch.random.fork_rng(devices=[]):
            return nn.functional.dropout(weights, 0.1)


class SetsTheGlobalSeed:
    def forward(self, q, k, v, key_mask):
        torch.manual_seed(0)
        return super().forward(q, k, v, key_mask)


class SetsTheMatmulPrecision:
    def forward(self, q, k, v, key_mask):
        torch.set_float32_matmul_precision("medium")
        return super().forward(q, k, v, key_mask)


class SetsTheThreads:
    def forward(self, q, k, v, key_mask):
        torch.set_num_threads(torch.get_num_threads() + 1)
        return super().forward(q, k, v, key_mask)


class WarnsOfLongTexts:
    def forward(self, q, k, v, key_mask):
        if k.shape[2] > 128:
            warnings.warn("this may take long", stacklevel=2)
        return super().forward(q, k, v, key_mask)


class ReturnsAutocastDtype:
    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        return out.float() if out.dtype == torch.bfloat16 else out


class CopiesShareEverything:
    def __deepcopy__(self, memo):
        return self


class DrawsAnew:
    def scores(self, q, k):
        self.generator = self.__dict__.get("generator") or torch.Generator()
        return super().scores(q, k) * (1 + 1e-6 * torch.rand((), generator=self.generator))


# Growth -----------------------------------------------------------------------------------------------


class _DenseBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        scores = gradient @ gradient.mT
        return gradient + 0 * scores[..., :1]


class TrainsInQuadraticMemory:
    def forward(self, q, k, v, key_mask):
        return _DenseBackward.apply(super().forward(q, k, v, key_mask))


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
