"""Backends without a fault, in steps that a broken backend replaces one at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from efficient_attn.backends.linear_attention import RandomFeatureOptions
from efficient_attn.ops.linear.features import draw_directions
from efficient_attn.problem import AttentionProblem


def with_gradient(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """x, whose gradient a function changes."""
    x = x.view_as(x)
    if x.requires_grad:
        x.register_hook(change)
    return x


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
        if key_mask is None:
            key_mask = torch.ones(len(k), k.shape[2], dtype=torch.bool, device=k.device)
        if state is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(state[:2], (k, v), strict=True))
            key_mask = torch.cat([state[2], key_mask], 1)
        out = q.new_zeros(*q.shape[:-1], v.shape[-1]) if k.shape[2] == 0 else self(q, k, v, key_mask)
        # A state owns its memory: the caller may use the tensors again.
        return out, (k.clone(), v.clone(), key_mask.clone())

    def for_every_head(self, x: Tensor, heads: int) -> Tensor:
        return x.repeat_interleave(heads // x.shape[1], dim=1)

    def hidden(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        return x if key_mask is None else x.masked_fill(~key_mask[:, None, :, None], 0.0)

    def wide(self, x: Tensor) -> Tensor:
        return x.to(torch.promote_types(x.dtype, torch.float32))

    def visible(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        if self.problem.causal:
            visible = visible.tril(k.shape[2] - q.shape[2])
        return visible[None, None] if key_mask is None else visible & key_mask[:, None, None, :]

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return self.wide(q) @ self.wide(k).mT * self.problem.factor

    def weights(self, scores: Tensor, visible: Tensor) -> Tensor:
        blind = ~visible.any(dim=-1, keepdim=True)
        weights = scores.masked_fill(~(visible | blind), -torch.inf)
        return weights.softmax(dim=-1).masked_fill(blind, 0.0)


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


class Alone(Softmax):
    """One call for each sequence, with tensors of its own and on one thread."""

    def forward(self, q, k, v, key_mask):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        masks = [None] * len(q) if key_mask is None else key_mask.split(1)
        parts = zip(q.split(1), k.split(1), v.split(1), masks, strict=True)
        outs = [super(Alone, self).forward(*(x if x is None else x.clone() for x in part)) for part in parts]
        torch.set_num_threads(threads)
        return torch.cat(outs)


class LinearMemory(Softmax):
    """Exact attention by torch's fused kernel, for two whole sequences without causality."""

    def forward(self, q, k, v, key_mask):
        return nn.functional.scaled_dot_product_attention(q, k, v, scale=self.problem.factor, enable_gqa=True)


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
        x = self.wide(x) * abs(self.problem.factor) ** 0.5
        return x @ self.directions.to(x).mT - x.square().sum(dim=-1, keepdim=True) / 2

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        # A negative scale turns the queries round.
        q = -q if self.problem.factor < 0 else q
        pairs = self.logarithms(q).unsqueeze(-2) + self.logarithms(k).unsqueeze(-3)
        return pairs.logsumexp(dim=-1)


class Window(Softmax):
    def visible(self, q, k, key_mask):
        back = ahead = self.options.window // 2
        if self.problem.causal:
            back, ahead = self.options.window - 1, 0
        before = k.shape[2] - q.shape[2]
        visible = super().visible(q, k, key_mask)
        near = torch.ones_like(visible[0, 0]).triu(before - back).tril(before + ahead)
        return visible & near


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """Keys that a query reads."""

    window: int = 5
