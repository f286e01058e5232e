"""Attention of other packages behind adapters: checked by others_page.py, measured like a backend.

`efficient-attn bench --backend docs/others.py:performer_pytorch` needs the packages, in an environment of
their own beside this one:

    pip install --no-deps performer-pytorch==1.1.4 local-attention==1.11.2 linformer==0.2.3 \
        axial-positional-embedding==0.3.12 einops==0.8.2 hyper-connections==0.4.11 torch-einops-utils==0.2.0
"""

import contextlib
import io
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_attn.options import option
from efficient_attn.registry import BackendSpec, Capabilities

PINNED = {"performer-pytorch": "1.1.4", "local-attention": "1.11.2", "linformer": "0.2.3"}


@dataclass(frozen=True, kw_only=True)
class Size:
    """What each package lets one choose, under one name."""

    size: int = option(256, "Features, window or rank.")


@dataclass(frozen=True, kw_only=True)
class SizeAndSeed(Size):
    """For those that draw something when they are built."""

    seed: int = option(0, "What torch's generator is set to before the layer is built.")


class Part(nn.Module):
    """In the place of a projection: entries `start` to `end` of its input."""

    def __init__(self, start: int, end: int) -> None:
        super().__init__()
        self.start, self.end = start, end

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.start : self.end]


def bare(layer: nn.Module, inner_dim: int) -> nn.Module:
    """A package's layer without its projections: q is its input, k and v side by side its context."""
    layer.to_q, layer.to_out = nn.Identity(), nn.Identity()
    layer.to_k, layer.to_v = Part(0, inner_dim), Part(inner_dim, None)
    return layer


def called(layer: nn.Module, scale: float, q: Tensor, k: Tensor, v: Tensor, **masks: Any) -> Tensor:
    """The output of a bare layer that knows neither another scale than 1/√dim nor grouped queries."""
    factor = scale * q.shape[-1] ** 0.5
    # Half of it on either side, as features take their own.
    q, k = q * math.copysign(abs(factor) ** 0.5, factor), k * abs(factor) ** 0.5
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    merged = [x.transpose(1, 2).flatten(2) for x in (q, k, v)]
    out = layer(merged[0], context=torch.cat(merged[1:], dim=-1), **masks)
    return out.unflatten(-1, (q.shape[1], -1)).transpose(1, 2)


class PerformerPytorch(nn.Module):
    def __init__(self, problem: Any, options: Any) -> None:
        super().__init__()
        from performer_pytorch.performer_pytorch import Attention

        heads, dim = problem.num_heads, problem.head_dim
        layer = Attention(heads * dim, problem.causal, heads, dim, nb_features=options.size)
        self.layer, self.scale = bare(layer, heads * dim), problem.factor

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        return called(self.layer, self.scale, q, k, v, context_mask=key_mask)

    def redraw(self, seed: int) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.layer.fast_attention.redraw_projection_matrix("cpu")


class LocalAttention(nn.Module):
    def __init__(self, problem: Any, options: Any) -> None:
        super().__init__()
        from local_attention import LocalAttention

        self.layer = LocalAttention(
            options.size, causal=problem.causal, autopad=True, exact_windowsize=True, scale=problem.factor
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return self.layer(q, k, v, mask=key_mask)


class Linformer(nn.Module):
    def __init__(self, problem: Any, options: Any) -> None:
        super().__init__()
        from linformer import LinformerSelfAttention

        heads, dim = problem.num_heads, problem.head_dim
        layer = LinformerSelfAttention(heads * dim, problem.max_tokens, options.size, heads, dim)
        self.layer, self.scale = bare(layer, heads * dim), problem.factor

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        # It takes values exactly as wide as keys: others come in pieces of that width.
        width, wide = k.shape[-1], v.shape[-1]
        pieces = F.pad(v, (0, -wide % width)).split(width, dim=-1)
        out = [called(self.layer, self.scale, q, k, piece) for piece in pieces]
        return torch.cat(out, dim=-1)[..., :wide]


@dataclass(frozen=True, kw_only=True)
class Package:
    """How a package is checked.

    Attributes:
        adapter: Takes (problem, options), maps (q, k, v, key_mask) to the output.
        capabilities: What its arguments and its README offer.
        lacks: Why a promise is not one of it, by the name of the check.
    """

    adapter: type[nn.Module]
    options: type
    capabilities: Capabilities
    lacks: dict[str, str]


_GROUPS = {"grouped_queries_are_repeated_heads": "No grouped queries; the adapter repeats the heads."}
_SCALE = {"scale_is_a_factor_on_the_scores": "No scale to choose; the adapter multiplies q and k."}
_LAST = {"a_query_alone_is_its_row": "No causality with fewer queries than keys."}

PACKAGES = {
    "performer-pytorch": Package(
        adapter=PerformerPytorch,
        options=SizeAndSeed,
        capabilities=Capabilities(causal=True, streaming=False, compile=False),
        lacks=_GROUPS | _SCALE | _LAST,
    ),
    "local-attention": Package(
        adapter=LocalAttention,
        options=Size,
        capabilities=Capabilities(causal=True, cross=False, streaming=False, compile=False),
        lacks=_GROUPS | _LAST,
    ),
    "linformer": Package(
        adapter=Linformer,
        options=SizeAndSeed,
        capabilities=Capabilities(
            causal=False,
            key_mask=False,
            nonnegative=False,
            averages=False,
            compile=False,
            needs_max_tokens=True,
        ),
        lacks=_GROUPS | _SCALE,
    ),
}


def spec_of(name: str, package: Package) -> BackendSpec:
    def build(problem: Any, options: Any) -> nn.Module:
        # None of the packages takes a seed; all may say something when they are built.
        with torch.random.fork_rng(), contextlib.redirect_stdout(io.StringIO()):
            torch.manual_seed(getattr(options, "seed", 0))
            return package.adapter(problem, options)

    return BackendSpec(
        name=name,
        summary="",
        options_type=package.options,
        size_option="size",
        capabilities=package.capabilities,
        builder=build,
    )


# What a command line finds.
performer_pytorch, local_attention, linformer = (spec_of(name, PACKAGES[name]) for name in PACKAGES)
