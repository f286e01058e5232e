"""Faults that depend on modes and global settings of torch, or change them."""

import warnings

import torch
from torch import nn


class TrainsOnSomethingElse:
    def weights(self, scores, visible):
        return super().weights(scores * 1.001 if self.training else scores, visible)


class ComputesInTheDefaultDtype:
    def scores(self, q, k):
        return super().scores(q, k) * torch.tensor(1.1, dtype=torch.get_default_dtype()).to(q.dtype)


class SeedsFromTheGlobalGenerator:
    def scores(self, q, k):
        return super().scores(q, k) * (1 + torch.initial_seed() % 7 * 1e-3)


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


class DrawsInFloat16:
    """Stochastic rounding, by the global generator."""

    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        return out * (1 + 1e-3 * torch.rand(())).to(out) if out.dtype == torch.float16 else out


class AdvancesTheGeneratorInFloat16:
    def forward(self, q, k, v, key_mask):
        if q.dtype == torch.float16:
            torch.rand(())
        return super().forward(q, k, v, key_mask)


class AnotherTemperatureOnTwoThreads:
    def scores(self, q, k):
        return super().scores(q, k) * (1.0 if torch.get_num_threads() == 1 else 1.01)


class BranchesOnTheMask:
    """A branch on data, which a graph cannot have."""

    def forward(self, q, k, v, key_mask):
        if key_mask is not None and key_mask.all():
            key_mask = None
        return super().forward(q, k, v, key_mask)


class CompilesTheUpperLeftTriangle:
    def visible(self, q, k, key_mask):
        visible = super().visible(q, k, key_mask)
        if self.problem.causal and torch.compiler.is_compiling():
            visible = visible & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        return visible


class DropsOutBeyond512:
    def weights(self, scores, visible):
        weights = super().weights(scores, visible)
        if not self.training or weights.shape[-1] <= 512:
            return weights
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.functional.dropout(weights, 0.1)


class SeedsBeyond1024:
    def forward(self, q, k, v, key_mask):
        if k.shape[2] > 1024:
            torch.manual_seed(0)
        return super().forward(q, k, v, key_mask)


class LeavesGradientModeOn:
    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        if q.shape[2] > 256 and not torch.is_inference_mode_enabled():
            torch.set_grad_enabled(True)
        return out


class FlushesSubnormalNumbers:
    def forward(self, q, k, v, key_mask):
        torch.set_flush_denormal(True)
        return super().forward(q, k, v, key_mask)


class LeavesTheDefaultDtypeWhenItFails:
    def forward(self, q, k, v, key_mask):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        out = super().forward(q, k, v, key_mask)
        torch.set_default_dtype(before)
        return out


class StaysBusyAfterAnError:
    """A flag that only a call without an error takes back."""

    def forward(self, q, k, v, key_mask):
        busy, self.__dict__["busy"] = self.__dict__.get("busy", False), True
        out = super().forward(q, k, v, key_mask) * (1.01 if busy else 1.0)
        self.__dict__["busy"] = False
        return out


class ReplacesSoftmax:
    def forward(self, q, k, v, key_mask):
        if nn.functional.softmax.__name__ == "softmax":
            softmax = nn.functional.softmax
            nn.functional.softmax = lambda *arguments, **options: softmax(*arguments, **options)
        return super().forward(q, k, v, key_mask)


class CountsItsTrainingCalls:
    """A running statistic, which training updates and evaluation reads."""

    def __init__(self, problem, options):
        super().__init__(problem, options)
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, q, k, v, key_mask):
        if self.training:
            self.mean = self.mean + 0.01
            return super().forward(q, k, v, key_mask)
        return super().forward(q * (1 + self.mean).to(q.dtype), k, v, key_mask)


class KeepsGraphsUnderNoGradBeyond256:
    def forward(self, q, k, v, key_mask):
        with torch.set_grad_enabled(torch.is_grad_enabled() or q.shape[2] > 256):
            return super().forward(q, k, v, key_mask)


class TrainsOnSomethingElseBeyond128Queries:
    def scores(self, q, k):
        return super().scores(q, k) * (1.01 if self.training and q.shape[2] > 128 else 1.0)


class TurnsGroupsWithoutGradients:
    """A kernel for inference groups heads in another order."""

    def for_every_head(self, x, heads):
        if torch.is_grad_enabled():
            return super().for_every_head(x, heads)
        return x.repeat(1, heads // x.shape[1], 1, 1)
