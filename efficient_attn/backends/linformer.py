"""Linformer: softmax attention over learned low-rank projections of keys and values."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from efficient_attn.errors import OptionError
from efficient_attn.operation_counts import MatMul, MatMuls, softmax_matmuls
from efficient_attn.ops.linformer import linformer_attention
from efficient_attn.options import one_of, option
from efficient_attn.problem import AttentionProblem, positive_count
from efficient_attn.registry import Capabilities, register

_SHARING = ("heads", "none", "key-value", "layers")
_INITS = ("mean-pool", "gaussian")


@dataclass(frozen=True, kw_only=True)
class LinformerOptions:
    rank: int = option(256, "Number of projected keys and values.")
    sharing: str = option(
        "heads",
        "heads: one pair of projections for all heads; none: a pair for each head; key-value: one "
        "projection for keys and values; layers: that one for a whole stack.",
    )
    init: str = option(
        "mean-pool", "mean-pool: means of neighbouring tokens; gaussian: entries of variance 1/rank."
    )

    def __post_init__(self) -> None:
        positive_count("rank", self.rank)
        one_of("sharing", self.sharing, _SHARING)
        one_of("init", self.init, _INITS)


class LinformerAttention(nn.Module):
    """Attention to `rank` projected tokens: a pooling until the projections are trained.

    Attributes:
        mix_keys: E, [rank max_tokens], or [num_heads rank max_tokens] with one pair per head.
        mix_values: F, of the same shape; the parameter E itself if keys and values share it.
    """

    def __init__(self, problem: AttentionProblem, options: LinformerOptions, max_tokens: int) -> None:
        super().__init__()
        self._scale = problem.factor
        heads = problem.num_heads if options.sharing == "none" else None
        self.mix_keys = nn.Parameter(_initial(options, max_tokens, heads, seed=0))
        if options.sharing in ("key-value", "layers"):
            self.mix_values = self.mix_keys
        else:
            self.mix_values = nn.Parameter(_initial(options, max_tokens, heads, seed=1))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        mixes = {"mix_keys": self.mix_keys, "mix_values": self.mix_values}
        return linformer_attention(q, k, v, scale=self._scale, key_mask=key_mask, **mixes)


def _initial(options: LinformerOptions, max_tokens: int, heads: int | None, *, seed: int) -> Tensor:
    shape = (options.rank, max_tokens) if heads is None else (heads, options.rank, max_tokens)
    if options.init == "gaussian":
        # Variance 1/rank, as in the paper's proofs (Wang et al. 2020, theorem 1).
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator, dtype=torch.float64).float() / options.rank**0.5
    # Row r averages the positions j with ⌊j · rank / max_tokens⌋ = r.
    row = torch.arange(max_tokens) * options.rank // max_tokens
    members = nn.functional.one_hot(row, options.rank).mT.float()
    means = members / members.sum(dim=-1, keepdim=True)
    return means.expand(shape).clone(memory_format=torch.contiguous_format)


def operations(problem: AttentionProblem, options: LinformerOptions, tokens: int, value_dim: int) -> MatMuls:
    """Products of the projections, then of every query with every projected key."""
    pairs, per_head = tokens * options.rank, options.sharing == "none"
    mixings = (MatMul(pairs * dim, shared=not per_head) for dim in (problem.head_dim, value_dim))
    return *mixings, *softmax_matmuls(pairs, problem.head_dim, value_dim)


def rank(problem: AttentionProblem, options: LinformerOptions) -> int:
    """Largest rank of the weights."""
    return options.rank


@register(
    "linformer",
    summary="Softmax over learned low-rank projections of keys and values; a pooling until trained.",
    formula="out_i = Σ_r softmax_r(s q_i·(E k)_r) (F v)_r, E and F of shape [rank, tokens]",
    paper="https://arxiv.org/abs/2006.04768",
    options=LinformerOptions,
    size_option="rank",
    capabilities=Capabilities(
        causal=False, nonnegative=False, averages=False, needs_max_tokens=True, sharded="sums"
    ),
    operations=operations,
    rank=rank,
)
def build(problem: AttentionProblem, options: LinformerOptions) -> LinformerAttention:
    assert problem.max_tokens is not None, "build refuses a missing max_tokens"
    if options.rank > problem.max_tokens:
        raise OptionError(
            f"rank={options.rank} is more than max_tokens={problem.max_tokens}; mixtures are at most as "
            f"many as tokens: rank={problem.max_tokens} or less."
        )
    if options.sharing == "none" and problem.num_heads is None:
        raise OptionError("sharing='none' keeps projections for each head: build it with num_heads.")
    return LinformerAttention(problem, options, problem.max_tokens)
