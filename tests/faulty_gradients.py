"""Faults of gradients: wrong, missing, or read from the wrong place."""

from collections.abc import Callable

import torch
from twins import Softmax, with_gradient


def _scaled(x, factor):
    return with_gradient(x, lambda gradient: gradient * factor)


class _OnTheOutput:
    """A function of the gradient of the output."""

    function: Callable

    def forward(self, q, k, v, key_mask):
        return with_gradient(super().forward(q, k, v, key_mask), self.function)


class DetachesLongKeys:
    def scores(self, q, k):
        return super().scores(q, k.detach() if k.shape[2] > 128 else k)


class HalvesTheGradientOfOtherValues:
    def forward(self, q, k, v, key_mask):
        v = _scaled(v, 0.5) if v.shape[-1] != q.shape[-1] else v
        return super().forward(q, k, v, key_mask)


class WrongWhereAllAsk:
    def forward(self, q, k, v, key_mask):
        q = _scaled(q, 1.01) if q.requires_grad and k.requires_grad and v.requires_grad else q
        return super().forward(q, k, v, key_mask)


class WrongWhereQueriesAreFrozen:
    def forward(self, q, k, v, key_mask):
        return super().forward(q, k if q.requires_grad else _scaled(k, 0.9), v, key_mask)


class NoGradientInLongFloat32:
    def forward(self, q, k, v, key_mask):
        q = q.detach() if q.dtype == torch.float32 and q.shape[2] > 64 and k.requires_grad else q
        return super().forward(q, k, v, key_mask)


class WrongGradientWhereMaskedAndCausal:
    def forward(self, q, k, v, key_mask):
        k = _scaled(k, 0.9) if key_mask is not None and self.problem.causal and len(k) > 1 else k
        return super().forward(q, k, v, key_mask)


class WrongGradientInGroups:
    def for_every_head(self, x, heads):
        return super().for_every_head(_scaled(x, 0.5) if x.shape[1] < heads else x, heads)


def _overwrites(gradient):
    given = gradient.clone()
    gradient.mul_(2.0)
    return given


class WritesToWhatFlowsBack:
    def forward(self, q, k, v, key_mask):
        return with_gradient(super().forward(q, k, v, key_mask), _overwrites)


def _from_memory(gradient):
    if 0 in gradient.stride():
        return gradient
    return (
        torch.empty_like(gradient).contiguous().as_strided_(gradient.shape, gradient.stride()).copy_(gradient)
        if gradient.is_contiguous()
        else gradient.as_strided(gradient.shape, gradient.contiguous().stride())
    )


class ReadsGradientsFromMemory:
    def forward(self, q, k, v, key_mask):
        return with_gradient(super().forward(q, k, v, key_mask), _from_memory)


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


class DetachesItsFactor:
    def scores(self, q, k):
        return Softmax.scores(self, q, k) * self.factor.detach()


class FactorIsNoParameter:
    def __init__(self, problem, options):
        super().__init__(problem, options)
        self.other = [torch.ones((), dtype=torch.float64, requires_grad=True)]

    def scores(self, q, k):
        return super().scores(q, k) * self.other[0].to(q.dtype)


def _cut(x, most):
    return with_gradient(x, lambda gradient: gradient.clamp(-most, most))


def _long(k):
    return k.numel() > 0 and k.detach().norm(dim=-1).max() > 10


class NoGradientOfLongKeys:
    def forward(self, q, k, v, key_mask):
        return super().forward(q, k.detach() if _long(k) else k, v, key_mask)


class NoGradientOfLongKeysInFloat32:
    def forward(self, q, k, v, key_mask):
        cut = k.dtype == torch.float32 and _long(k)
        return super().forward(q.detach() if cut and k.requires_grad else q, k, v, key_mask)


class CutsGradientsOfLongKeys:
    def scores(self, q, k):
        scores = super().scores(q, k)
        return _cut(scores, 1e-3) if _long(k) else scores


class HalfPrecisionGradientsOfLongKeys:
    def scores(self, q, k):
        if k.dtype == torch.float32 and _long(k):
            rounded = k.detach().bfloat16().float() if torch.is_grad_enabled() else k.detach()
            k = k + (rounded - k.detach())
        return super().scores(q, k)


class KeepsGraphsUnderNoGrad:
    def forward(self, q, k, v, key_mask):
        with torch.enable_grad():
            return super().forward(q, k, v, key_mask)


class KeepsGraphsOfStatesUnderNoGrad:
    def extend(self, q, k, v, state, key_mask):
        with torch.enable_grad():
            return super().extend(q, k, v, state, key_mask)


class RemembersItsLastGraph:
    def forward(self, q, k, v, key_mask):
        with torch.enable_grad():
            self.__dict__["last"] = super().forward(q, k, v, key_mask)
        return self.__dict__["last"].clone() if torch.is_grad_enabled() else self.__dict__["last"].detach()


class HalvesTheGradientOfFloat16:
    def forward(self, q, k, v, key_mask):
        half = v.dtype == torch.float16 and v.shape[2] > 64
        return super().forward(q, k, _scaled(v, 0.5) if half else v, key_mask)


class HasTheDefaultScaleBackward:
    def scores(self, q, k):
        default = self.problem.head_dim**-0.5
        factor = default / self.problem.factor if self.problem.factor else 1.0
        return super().scores(_scaled(q, factor), _scaled(k, factor))


class CutsGradientsAt100:
    def forward(self, q, k, v, key_mask):
        return super().forward(_cut(q, 100.0), k, v, key_mask)


def _flushes(gradient):
    """Gradients in half precision, which cannot express parts in a million."""
    return torch.where(gradient.abs() < 6e-8, 0.0, gradient)


class FlushesSmallGradients:
    def forward(self, q, k, v, key_mask):
        return with_gradient(super().forward(q, k, v, key_mask), _flushes)


def _viewed(gradient):
    return gradient.view(-1, *gradient.shape[2:]).view(gradient.shape)


class ViewsGradientsAsContiguous:
    def forward(self, q, k, v, key_mask):
        return with_gradient(super().forward(q, k, v, key_mask), _viewed)


def _rounded(gradient):
    return gradient.bfloat16().to(gradient)


class RoundsGradientsBeyond1024Queries:
    def scores(self, q, k):
        scores = super().scores(q, k)
        return with_gradient(scores, _rounded) if q.shape[2] > 1024 else scores


class SumsGradientsOfValuesByTiles:
    """Each tile of 64 queries adds its gradient in the dtype of the values."""

    def forward(self, q, k, v, key_mask):
        if q.shape[2] <= 64 or self.problem.causal:
            return super().forward(q, k, v, key_mask)
        forward = super().forward
        return torch.cat([forward(part, k, v, key_mask) for part in q.split(64, dim=2)], dim=2)


def _larger_where_expanded(gradient):
    return gradient * (1.5 if 0 in gradient.stride() and gradient.numel() > 1 else 1.0)


class TakesExpandedGradientsForSums(_OnTheOutput):
    function = staticmethod(_larger_where_expanded)


def _cleaned(gradient):
    return gradient.nan_to_num()


class CleansGradients(_OnTheOutput):
    function = staticmethod(_cleaned)


def _float32_gradient(gradient):
    return gradient.float().to(gradient)


class GradientsOfScoresInFloat32:
    def scores(self, q, k):
        return with_gradient(super().scores(q, k), _float32_gradient)


def _float16_gradient(gradient):
    return gradient.half().to(gradient)


class GradientsOfScoresInFloat16:
    """Products of upstream gradients and values overflow under loss scaling."""

    def weights(self, scores, visible):
        weights = super().weights(scores, visible)
        return weights if weights.dtype == torch.float64 else with_gradient(weights, _float16_gradient)


class _Workspace(torch.autograd.Function):
    """The backward pass reads a buffer that the next forward pass fills."""

    @staticmethod
    def forward(ctx, q, buffers):
        ctx.buffer = buffers.setdefault((q.shape, q.dtype), torch.empty_like(q)).copy_(q)
        ctx.save_for_backward(q)
        return q.view_as(q)

    @staticmethod
    def backward(ctx, gradient):
        (q,) = ctx.saved_tensors
        return gradient * (1 + (ctx.buffer - q)), None


class ReusesItsWorkspaceBackward:
    def forward(self, q, k, v, key_mask):
        if q.requires_grad:
            q = _Workspace.apply(q, self.__dict__.setdefault("buffers", {}))
        return super().forward(q, k, v, key_mask)


def _wrong_twice(gradient):
    """A gradient whose own gradient is half of what it is."""
    return _scaled(gradient, 0.5)


class HalvesSecondDerivativesInGroups:
    def for_every_head(self, x, heads):
        x = super().for_every_head(x, heads)
        return with_gradient(x, _wrong_twice) if heads > 2 else x


class _KeepsItsInput(torch.autograd.Function):
    """Reads its input again in the backward pass, without a look at its version."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.x * gradient


class ReadsValuesLater:
    def forward(self, q, k, v, key_mask):
        # (v + 2)² / 4 − v² / 4 − 1 = v, of which the first square is read again.
        copied = v.clone()
        later = _KeepsItsInput.apply(v) + 4 * v + 4
        return super().forward(q, k, (later - copied * copied) / 4 - 1, key_mask)


class WrongGradientInLargeBatches:
    def forward(self, q, k, v, key_mask):
        return super().forward(q, _scaled(k, 0.9) if len(k) > 32 else k, v, key_mask)


class HalvesGradientsOfGroupsInBfloat16:
    def for_every_head(self, x, heads):
        half = x.dtype == torch.bfloat16 and x.shape[1] < heads
        return super().for_every_head(_scaled(x, 0.5) if half else x, heads)


class DetachesTheLastKeyOfFullTiles:
    def scores(self, q, k):
        if k.shape[2] % 64 == 0 and k.shape[2]:
            k = torch.cat([k[:, :, :-1], k[:, :, -1:].detach()], dim=2)
        return super().scores(q, k)
