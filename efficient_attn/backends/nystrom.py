"""Nyströmformer: softmax attention through landmarks, the means of segments of tokens."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from efficient_attn.operation_counts import MatMul, MatMuls, softmax_matmuls
from efficient_attn.ops.dtypes import upcast, zero_masked
from efficient_attn.ops.paths import dynamic
from efficient_attn.ops.softmax.fused import fused_attention
from efficient_attn.options import option
from efficient_attn.problem import AttentionProblem, positive_count
from efficient_attn.registry import Capabilities, register


@dataclass(frozen=True, kw_only=True)
class NystromOptions:
    landmarks: int = option(64, "Number of landmarks, the means of segments of real tokens.")
    iterations: int = option(6, "Iterations of the pseudo-inverse.")

    def __post_init__(self) -> None:
        positive_count("landmarks", self.landmarks)
        positive_count("iterations", self.iterations)


class NystromAttention(nn.Module):
    """softmax(s q k̃ᵀ) A⁺ softmax(s q̃ kᵀ) v, A = softmax(s q̃ k̃ᵀ) (Xiong et al. 2021, eq. 13).

    Landmarks q̃ and k̃ are means of segments of real tokens. The first and last factor are softmax attention,
    and the fused kernel computes both.
    """

    def __init__(self, options: NystromOptions, scale: float) -> None:
        super().__init__()
        self.options, self.scale = options, scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        segments, alive = _segments(q, key_mask, self.options.landmarks)
        wide_q, k, v = (upcast(x) for x in (q, zero_masked(k, key_mask), zero_masked(v, key_mask)))
        landmark_q, landmark_k = (
            torch.einsum("bmn,bhnd->bhmd", segments.to(x.dtype), x)
            for x in (zero_masked(wide_q, key_mask), k)
        )
        landmark_k = landmark_k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        attend = partial(fused_attention, scale=self.scale, dropout=0.0, zeroed=True)
        rows = attend(landmark_q, k, v, key_mask=key_mask)
        # Rows and columns of empty segments are zeros.
        keys, both = alive[:, None, None], alive[:, None, None] & alive[:, None, :, None]
        scores = (self.scale * landmark_q @ landmark_k.mT).masked_fill(~keys, -torch.inf)
        between = scores.softmax(dim=-1).masked_fill(~both, 0.0)
        rows = pseudo_inverse(between, self.options.iterations) @ rows
        return attend(wide_q, landmark_k, rows, key_mask=alive).to(q.dtype)


def _segments(q: Tensor, key_mask: Tensor | None, landmarks: int) -> tuple[Tensor, Tensor]:
    """Means over segments, [1|batch landmarks tokens], and which have tokens, bool [batch landmarks].

    The r-th of R real tokens belongs to segment ⌊r m / R⌋ with m = min(landmarks, R). Masked tokens take no
    part, so that padding and gaps change no mean.
    """
    real = torch.ones_like(q[:1, 0, :, 0], dtype=torch.bool) if key_mask is None else key_mask
    count = real.sum(dim=-1, keepdim=True)
    most = landmarks if dynamic(q.shape[2]) else min(landmarks, q.shape[2])
    index = torch.arange(most, device=q.device)
    segment = (real.cumsum(dim=-1) - 1) * count.clamp_max(landmarks) // count.clamp_min(1)
    members = (segment.unsqueeze(1) == index[:, None]) & real.unsqueeze(1)
    sizes = members.sum(dim=-1, keepdim=True)
    return members / sizes.clamp_min(1).to(upcast(q).dtype), sizes.squeeze(-1).expand(len(q), -1) > 0


def pseudo_inverse(x: Tensor, iterations: int) -> Tensor:
    """Iterative Moore–Penrose inverse of row-stochastic matrices (Xiong et al. 2021, eq. 11 and 12)."""
    # ‖A‖∞ is 1. ‖A‖₁ is at least 1, the mean of the column sums, but for matrices of zeros.
    z = x.mT / x.sum(dim=-2).amax(dim=-1).clamp_min(1.0)[..., None, None]
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    inner, middle, outer = 7 * identity, 15 * identity, 13 * identity
    for _ in range(iterations):
        xz = x @ z
        z = z @ (outer - xz @ (middle - xz @ (inner - xz))) / 4
    return z


def operations(problem: AttentionProblem, options: NystromOptions, tokens: int, value_dim: int) -> MatMuls:
    """Products of the means, of all tokens with the landmarks, and of the pseudo-inverse."""
    dim, few = problem.head_dim, min(options.landmarks, tokens)
    means = (MatMul(few * tokens * dim, gradients=1, shared=shared) for shared in (False, True))
    reads = 2 * softmax_matmuls(few * tokens, dim, value_dim)
    iterations = 4 * options.iterations * (MatMul(few**3),)
    between = (MatMul(few * few * dim), MatMul(few * few * value_dim))
    return (*means, *reads, *between, *iterations)


def rank(problem: AttentionProblem, options: NystromOptions) -> int:
    """Largest rank of the weights."""
    return options.landmarks


@register(
    "nystrom",
    summary="Softmax through landmarks, with an iterative pseudo-inverse between them.",
    formula="out = softmax(s q k̃ᵀ) pinv(softmax(s q̃ k̃ᵀ)) softmax(s q̃ kᵀ) v, q̃ and k̃ means of segments",
    paper="https://arxiv.org/abs/2102.03902",
    options=NystromOptions,
    size_option="landmarks",
    # Landmarks average all queries: later rows, or rows of another sequence, would change every output.
    capabilities=Capabilities(causal=False, cross=False, nonnegative=False, averages=False),
    operations=operations,
    rank=rank,
    compared=False,
)
def build(problem: AttentionProblem, options: NystromOptions) -> NystromAttention:
    return NystromAttention(options, problem.factor)
