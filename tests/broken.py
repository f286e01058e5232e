"""Backends with one fault each, faults that published code has or had, beside twins without any.

`BROKEN` maps the name of a fault to the broken backend, its twin and the check that tells them apart.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from efficient_attn.modules.features import RandomFeatureOptions
from efficient_attn.ops.projections import draw_directions
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import BackendSpec, Capabilities, NoOptions


class Softmax(nn.Module):
    """Softmax attention in steps that a broken backend replaces one at a time."""

    def __init__(self, problem: AttentionProblem, options: Any) -> None:
        super().__init__()
        self.problem, self.options = problem, options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        k, v = (self.for_every_head(self.hidden(x, key_mask), q.shape[1]) for x in (k, v))
        visible = self.visible(q, k, key_mask)
        return (self.weights(self.scores(q, k), visible) @ self.wide(v)).to(q.dtype)

    def extend(self, q, k, v, state, key_mask):
        mask = torch.ones(len(k), k.shape[2], dtype=torch.bool) if key_mask is None else key_mask
        if state is not None:
            k, v, mask = (
                torch.cat([state[0], k], 2),
                torch.cat([state[1], v], 2),
                torch.cat([state[2], mask], 1),
            )
        out = q.new_zeros(*q.shape[:-1], v.shape[-1]) if k.shape[2] == 0 else self(q, k, v, mask)
        return out, (k, v, mask)

    def for_every_head(self, x: Tensor, heads: int) -> Tensor:
        return x.repeat_interleave(heads // x.shape[1], dim=1)

    def hidden(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        return x if key_mask is None else x.masked_fill(~key_mask[:, None, :, None], 0.0)

    def wide(self, x: Tensor) -> Tensor:
        return x.to(torch.promote_types(x.dtype, torch.float32))

    def visible(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        if self.problem.causal:
            visible = visible.tril(k.shape[2] - q.shape[2])
        return visible[None, None] if key_mask is None else visible & key_mask[:, None, None, :]

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return self.wide(q) @ self.wide(k).mT * self.problem.factor

    def weights(self, scores: Tensor, visible: Tensor) -> Tensor:
        blind = ~visible.any(dim=-1, keepdim=True)
        weights = scores.masked_fill(~(visible | blind), -torch.inf)
        return weights.softmax(dim=-1).masked_fill(blind, 0.0)


class Positive(Softmax):
    """Positive random features, with the score matrix built whole."""

    def __init__(self, problem: AttentionProblem, options: RandomFeatureOptions) -> None:
        super().__init__(problem, options)
        self.keep(self.draw(options.seed))

    def keep(self, directions: Tensor) -> None:
        self.register_buffer("directions", directions.float())

    def draw(self, seed: int) -> Tensor:
        return draw_directions("orthogonal", self.options.num_features, self.problem.head_dim, seed=seed)

    def redraw(self, seed: int) -> None:
        self.directions.copy_(self.draw(seed))

    def logarithms(self, x: Tensor) -> Tensor:
        x = self.wide(x) * self.problem.factor**0.5
        return x @ self.directions.to(x).mT - x.square().sum(dim=-1, keepdim=True) / 2

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        pairs = self.logarithms(q).unsqueeze(-2) + self.logarithms(k).unsqueeze(-3)
        return pairs.logsumexp(dim=-1)


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


class Window(Softmax):
    def visible(self, q, k, key_mask):
        return band(super().visible(q, k, key_mask), self.problem, self.options.window)


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


def band(visible: Tensor, problem: AttentionProblem, window: int) -> Tensor:
    """What is visible among the nearest keys."""
    back, ahead = (window - 1, 0) if problem.causal else (window // 2, window // 2)
    before = visible.shape[-1] - visible.shape[-2]
    return visible & torch.ones_like(visible).triu(before - back).tril(before + ahead)


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """Keys that a query reads."""

    window: int = 5


class Pair(NamedTuple):
    """A broken backend, its twin, and the check that tells them apart."""

    broken: BackendSpec
    twin: BackendSpec
    check: str


EXACT = Capabilities(causal=True, exact=True, second_derivatives=True, time_growth=2, memory_growth=2)
RANDOM = Capabilities(causal=True, second_derivatives=True, time_growth=2, memory_growth=2)
LOCAL = Capabilities(causal=True, cross=False, second_derivatives=True, time_growth=2, memory_growth=2)
ONCE = Capabilities(causal=True, time_growth=2, memory_growth=2, exact=True)


def spec_of(core: Callable[..., nn.Module], capabilities: Capabilities, options: type, size: str | None):
    name = getattr(core, "__name__", "twin")
    return BackendSpec(
        name=name,
        summary=f"{name}, a backend of the tests.",
        options_type=options,
        size_option=size,
        capabilities=capabilities,
        builder=core,
    )


def _pair(core: type[Softmax], check: str, capabilities: Capabilities | None = None) -> Pair:
    if issubclass(core, Positive):
        kind: tuple = (RANDOM, RandomFeatureOptions, "num_features")
        twin: type[Softmax] = Positive
    elif core is WindowOffByOne:
        kind, twin = (LOCAL, WindowOptions, "window"), Window
    else:
        kind, twin = (EXACT, NoOptions, None), Softmax
    return Pair(spec_of(core, capabilities or kind[0], *kind[1:]), spec_of(twin, *kind), check)


PAIRS = (
    _pair(MasksValuesOnly, "amount_of_padding_does_not_matter"),
    _pair(MultipliesByTheMask, "padding_contents_change_no_bit"),
    _pair(ReadsEverythingWhereItIsBlind, "blind_queries_give_zeros"),
    _pair(ForgetsTheMaskWhenExtending, "extend_honours_its_mask"),
    _pair(PadsWithoutAMask, "weights_of_a_row_sum_to_one"),
    _pair(IgnoresCausality, "no_output_depends_on_a_later_token"),
    _pair(AlignsQueriesWithTheFirstKeys, "queries_are_the_last_positions"),
    _pair(MixesThenMasks, "no_output_depends_on_a_later_token"),
    _pair(KnowsTheLargestFutureKey, "later_values_move_no_output"),
    _pair(SumsOverTheWrongAxis, "more_features_come_nearer_to_softmax"),
    _pair(ScalesTwice, "scale_is_a_factor_on_the_scores"),
    _pair(ClampsTheDenominator, "weights_of_a_row_sum_to_one"),
    _pair(SumsInHalfPrecision, "long_sums_do_not_stall_in_half_precision"),
    _pair(ScoresInHalfPrecision, "large_inputs_stay_finite"),
    _pair(RepeatsHeadsInTurn, "grouped_queries_are_repeated_heads"),
    _pair(WindowOffByOne, "a_window_reads_its_neighbourhood"),
    _pair(DrawsWithoutTheSigns, "the_draw_has_no_preferred_direction"),
    _pair(RowsOfTheWrongLength, "more_features_come_nearer_to_softmax"),
    _pair(RedrawsEveryTime, "the_same_call_gives_the_same_bits"),
    _pair(KeepsItsDrawToItself, "a_saved_state_brings_the_output_back"),
    _pair(SeedsFromTheBatch, "batch_mates_do_not_matter"),
    _pair(IgnoresItsSize, "the_size_matters"),
    _pair(WritesToItsInputs, "inputs_are_not_written_to"),
    _pair(UsesTheGlobalGenerator, "nothing_global_is_touched"),
    _pair(LosesItsSecondDerivatives, "second_derivatives_are_right_or_refused", ONCE),
)
