"""Backends with one fault each, such as published code has or had."""

import math

import torch
from torch import nn
from twins import Positive, Softmax, band

from efficient_attn.backends.linear_attention import RandomFeatureOptions
from efficient_attn.distributed.keys import attend_keys

# Faults of masks -------------------------------------------------------------------------------------


class MasksValuesOnly(Softmax):
    """Masked keys stay in the denominator."""

    def visible(self, q, k, key_mask):
        return super().visible(q, k, None)


class MultipliesByTheMask(Softmax):
    """A weight of zero times NaN is NaN."""

    def hidden(self, x, key_mask):
        return x


class ReadsEverythingWhereItIsBlind(Softmax):
    """A large negative number in place of minus infinity: a blind row becomes uniform."""

    def weights(self, scores, visible):
        return scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(dim=-1)


class ForgetsTheMaskWhenExtending(Softmax):
    def extend(self, q, k, v, state, key_mask):
        return super().extend(q, k, v, state, None)


class PadsWithoutAMask(Softmax):
    """Zeros are appended up to a multiple of a block, and their scores of zero join the softmax."""

    def forward(self, q, k, v, key_mask):
        more = -k.shape[2] % 4
        if not self.problem.causal:
            k, v = (nn.functional.pad(x, (0, 0, 0, more)) for x in (k, v))
            key_mask = None if key_mask is None else nn.functional.pad(key_mask, (0, more), value=False)
        return super().forward(q, k, v, key_mask)


# Faults between ranks --------------------------------------------------------------------------------


class ReadsItsOwnRank(Softmax):
    """Attention without an exchange, as torch's context_parallel runs it."""

    @staticmethod
    def exchange(backend, q, k, v, key_mask, layout):
        return backend.core(q, k, v, key_mask)


class JoinsRanksInTheirOrder(Softmax):
    """Right for contiguous segments, wrong for those of a head-tail layout."""

    @staticmethod
    def exchange(backend, q, k, v, key_mask, layout):
        return attend_keys(backend, q, k, v, key_mask, layout._replace(kind="contiguous"))


class MultipliesGradientsByTheRanks(Softmax):
    """The output is right; every rank sums the gradients of all, and the sums are summed again."""

    @staticmethod
    def exchange(backend, q, k, v, key_mask, layout):
        k, v = (x + (layout.ranks - 1) * (x - x.detach()) for x in (k, v))
        return attend_keys(backend, q, k, v, key_mask, layout)


# Faults of causality ---------------------------------------------------------------------------------


class IgnoresCausality(Softmax):
    def visible(self, q, k, key_mask):
        return torch.ones_like(super().visible(q, k, None)) if key_mask is None else key_mask[:, None, None]


class AlignsQueriesWithTheFirstKeys(Softmax):
    def visible(self, q, k, key_mask):
        visible = super().visible(q, k, key_mask)
        return visible & torch.ones_like(visible).tril() if self.problem.causal else visible


class MixesThenMasks(Softmax):
    """A causal Linformer: the mask is laid over mixtures that know the future already."""

    def forward(self, q, k, v, key_mask):
        mix = torch.full((k.shape[2], k.shape[2]), 1 / max(1, k.shape[2]), dtype=k.dtype)
        return super().forward(q, mix @ k, mix @ v, key_mask)


class KnowsTheLargestFutureKey(Positive):
    """The keys' maximum runs over later positions, and an additive epsilon makes it matter."""

    def scores(self, q, k):
        query, key = self.logarithms(q), self.logarithms(k)
        features = (key - key.amax(dim=(-1, -2), keepdim=True)).exp() + 1e-4
        queries = (query - query.amax(dim=-1, keepdim=True)).exp() + 1e-4
        return (queries @ features.mT).log()


class SumsOverTheWrongAxis(Positive):
    """The cumulative sum runs over features instead of tokens: each token reads itself alone."""

    def visible(self, q, k, key_mask):
        visible = super().visible(q, k, key_mask)
        ahead = k.shape[2] - q.shape[2]
        return visible & torch.ones_like(visible).triu(ahead) if self.problem.causal else visible


# Faults of numbers -----------------------------------------------------------------------------------


class ScalesTwice(Softmax):
    def scores(self, q, k):
        return super().scores(q, k) * self.problem.factor


class ClampsTheDenominator(Softmax):
    """A denominator kept above one shrinks every row whose sum is less."""

    def weights(self, scores, visible):
        weights = torch.where(visible, scores.exp(), 0.0)
        return weights / weights.sum(dim=-1, keepdim=True).clamp_min(1.0)


class SumsInHalfPrecision(Softmax):
    """The denominator is kept in the dtype of the queries."""

    def scores(self, q, k):
        self.dtype = q.dtype
        return super().scores(q, k)

    def weights(self, scores, visible):
        weights = torch.where(visible, scores.exp(), 0.0)
        total = weights.to(self.dtype).sum(dim=-1, keepdim=True).to(weights)
        return weights / torch.where(total > 0, total, 1.0)


class ScoresInHalfPrecision(Softmax):
    def wide(self, x):
        return x


class RepeatsHeadsInTurn(Softmax):
    """Grouped queries meet the heads of another group."""

    def for_every_head(self, x, heads):
        return x.repeat(1, heads // x.shape[1], 1, 1)


class WindowOffByOne(Softmax):
    def visible(self, q, k, key_mask):
        return band(super().visible(q, k, key_mask), self.problem, self.options.window + 1)


# Faults of random features ---------------------------------------------------------------------------


class DrawsWithoutTheSigns(Positive):
    """The Q of a QR decomposition as it comes has a preferred sign."""

    def draw(self, seed):
        dim, generator = self.problem.head_dim, torch.Generator().manual_seed(seed)
        blocks = -(-self.options.num_features // dim)
        gaussian = torch.randn(2, blocks, dim, dim, generator=generator, dtype=torch.float64)
        rotations, lengths = torch.linalg.qr(gaussian[0])[0], gaussian[1].norm(dim=-1, keepdim=True)
        return (rotations * lengths).flatten(0, 1)[: self.options.num_features]


class RowsOfTheWrongLength(Positive):
    """Orthogonal rows of norm 1 instead of about √head_dim."""

    def draw(self, seed):
        return super().draw(seed) / math.sqrt(self.problem.head_dim)


class RedrawsEveryTime(Positive):
    def forward(self, q, k, v, key_mask):
        self.calls = getattr(self, "calls", 0) + 1
        self.redraw(self.calls)
        return super().forward(q, k, v, key_mask)


class KeepsItsDrawToItself(Positive):
    """The features are a plain attribute: no checkpoint has them."""

    def keep(self, directions):
        self.directions = directions.float()


class SeedsFromTheBatch(Positive):
    """The seed is a sum over the queries: what else is in the batch changes a sequence's output."""

    def forward(self, q, k, v, key_mask):
        total = float(q.detach().double().nan_to_num().sum())
        self.redraw(math.ceil(abs(total) * 1e7) % 2**31)
        return super().forward(q, k, v, key_mask)


class IgnoresItsSize(Positive):
    def __init__(self, problem, options):
        super().__init__(problem, RandomFeatureOptions(num_features=4, seed=options.seed))


# Faults of manners -----------------------------------------------------------------------------------


class WritesToItsInputs(Softmax):
    def scores(self, q, k):
        return q.mul_(self.problem.factor) @ k.mT if not q.requires_grad else super().scores(q, k)


class UsesTheGlobalGenerator(Softmax):
    def scores(self, q, k):
        return super().scores(q, k) + 0 * torch.rand(())


class HoldsAllScores(Softmax):
    """Nothing is wrong with it but what is said of it: that memory grows linearly."""


class LosesItsSecondDerivatives(Softmax):
    """A backward pass of its own that does not say that it can be differentiated once only."""

    def weights(self, scores, visible):
        return _Softmax.apply(scores.masked_fill(~visible, -1e9)) * visible


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores):
        ctx.weights = scores.softmax(dim=-1).detach()
        return ctx.weights.clone()

    @staticmethod
    def backward(ctx, gradient):
        weighted = ctx.weights * gradient
        return weighted - ctx.weights * weighted.sum(dim=-1, keepdim=True)
