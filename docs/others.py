"""Attention of other packages behind adapters: checked by others_page.py, measured like a backend.

`efficient-attn bench --backend docs/others.py:performer_pytorch` needs the package and what it imports, at
the versions of `others_packages.py`: `pip install --no-deps`, in an environment of their own.
"""

import contextlib
import copy
import io
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_attn.options import option
from efficient_attn.registry import BackendSpec, Capabilities, NoOptions


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


class Handed(nn.Module):
    """In the place of a projection: a tensor, whatever its input."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x

    def forward(self, _: Tensor) -> Tensor:
        return self.x


def bare(layer: nn.Module, inner_dim: int) -> nn.Module:
    """A package's layer without its projections: q is its input, k and v side by side its context."""
    layer.to_q, layer.to_out = nn.Identity(), nn.Identity()
    layer.to_k, layer.to_v = Part(0, inner_dim), Part(inner_dim, None)
    return layer


class Third(nn.Module):
    """In the place of a projection: a third of its input."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1] // 3
        # Not a chunk, into which autograd forbids writing in place.
        return x[..., self.number * width : (self.number + 1) * width]


def in_thirds(layer: nn.Module, *names: str) -> nn.Module:
    """A layer of self-attention without its projections: q, k and v side by side are its input."""
    for number, name in enumerate(names):
        setattr(layer, name, Third(number))
    return layer


def handed(layer: nn.Module, x: Tensor) -> nn.Module:
    """A copy of Longformer's layer for one call with q, k and v: the width of its input is that of q."""
    layer = copy.copy(layer)
    names = enumerate(("query", "key", "value"))
    layer._modules = {name: Handed(Third(number)(x).transpose(0, 1)) for number, name in names}
    return layer


def called(
    layer: Callable[..., Tensor],
    scale: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    with_context: bool = False,
    **masks: Any,
) -> Tensor:
    """The output of a bare layer that knows neither another scale than 1/√dim nor grouped queries.

    It takes values exactly as wide as keys: others come in pieces of that width.
    """
    factor = scale * q.shape[-1] ** 0.5
    # Half of it on either side, as features take their own.
    q, k = q * math.copysign(abs(factor) ** 0.5, factor), k * abs(factor) ** 0.5
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    width, wide = k.shape[-1], v.shape[-1]
    outputs = []
    for piece in F.pad(v, (0, -wide % width)).split(width, dim=-1):
        merged = [x.transpose(1, 2).flatten(2) for x in (q, k, piece)]
        if with_context:
            out = layer(merged[0], context=torch.cat(merged[1:], dim=-1), **masks)
        else:
            out = layer(torch.cat(merged, dim=-1), **masks)
        outputs.append(out.unflatten(-1, (q.shape[1], -1)).transpose(1, 2))
    return torch.cat(outputs, dim=-1)[..., :wide]


def padded(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, multiple: int, least: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k and v with zeros up to a multiple, as the models pad, and a mask without them."""
    tokens = q.shape[-2]
    if key_mask is None:
        key_mask = torch.ones(q.shape[0], tokens, dtype=torch.bool, device=q.device)
    length = max(tokens + -tokens % multiple, least * multiple)
    q, k, v = (F.pad(x, (0, 0, 0, length - tokens)) for x in (q, k, v))
    return q, k, v, F.pad(key_mask, (0, length - tokens))


class PerformerPytorch(nn.Module):
    def __init__(self, problem: Any, options: Any) -> None:
        super().__init__()
        from performer_pytorch.performer_pytorch import Attention

        heads, dim = problem.num_heads, problem.head_dim
        layer = Attention(heads * dim, problem.causal, heads, dim, nb_features=options.size)
        self.layer, self.scale = bare(layer, heads * dim), problem.factor

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        return called(self.layer, self.scale, q, k, v, with_context=True, context_mask=key_mask)

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
        return called(self.layer, self.scale, q, k, v, with_context=True)


class XTransformers(nn.Module):
    def __init__(self, problem: Any, options: Any) -> None:
        super().__init__()
        from x_transformers.attend import Attend

        self.layer = Attend(causal=problem.causal, scale=problem.factor)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        return self.layer(q, k, v, mask=key_mask)[0]


class LinearAttentionTransformer(nn.Module):
    def __init__(self, problem: Any, options: Any) -> None:
        super().__init__()
        from linear_attention_transformer.linear_attention_transformer import SelfAttention

        width = problem.num_heads * problem.head_dim
        layer = SelfAttention(width, problem.num_heads, causal=problem.causal, receives_context=True)
        self.layer, self.scale = bare(layer, width), problem.factor

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        return called(self.layer, self.scale, q, k, v, with_context=True, context_mask=key_mask)


class NystromAttention(nn.Module):
    def __init__(self, problem: Any, options: Any) -> None:
        super().__init__()
        from nystrom_attention import NystromAttention

        heads, dim = problem.num_heads, problem.head_dim
        self.layer = NystromAttention(heads * dim, dim, heads, options.size, residual=False)
        self.layer.to_qkv, self.layer.to_out, self.scale = nn.Identity(), nn.Identity(), problem.factor

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        return called(self.layer, self.scale, q, k, v, mask=key_mask)


class BigBird(nn.Module):
    def __init__(self, problem: Any, options: Any) -> None:
        super().__init__()
        from transformers.models.big_bird import modeling_big_bird as module

        heads, self.size, self.scale = problem.num_heads, options.size, problem.factor
        sizes = {"hidden_size": heads * problem.head_dim, "num_attention_heads": heads}
        config = module.BigBirdConfig(block_size=self.size, **sizes)
        self.layer = in_thirds(module.BigBirdBlockSparseAttention(config, seed=0), "query", "key", "value")
        self.masks = module.BigBirdModel.create_masks_for_block_sparse_attn

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        # Up to 11 blocks the model would not be sparse.
        *inputs, mask = padded(q, k, v, key_mask, self.size, least=12)
        blocks, band, rows, columns = self.masks(mask.to(q.dtype), self.size)
        masks = band, rows, columns, blocks, blocks
        return called(lambda x: self.layer(x, *masks)[0], self.scale, *inputs)[..., : q.shape[-2], :]


class Longformer(nn.Module):
    def __init__(self, problem: Any, options: Any) -> None:
        super().__init__()
        from transformers.models.longformer import modeling_longformer as module

        heads, self.size, self.scale = problem.num_heads, 2 * options.size, problem.factor
        sizes = {"hidden_size": heads * problem.head_dim, "num_attention_heads": heads}
        config = module.LongformerConfig(num_hidden_layers=1, attention_window=[self.size], **sizes)
        self.layer = module.LongformerSelfAttention(config, 0)
        self.layer.dropout = 0.0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        *inputs, mask = padded(q, k, v, key_mask, self.size)
        masks = {"attention_mask": -10000.0 * ~mask, "is_index_masked": ~mask, "is_global_attn": False}
        out = called(lambda x: handed(self.layer, x)(Third(0)(x), **masks)[0], self.scale, *inputs)
        return out[..., : q.shape[-2], :]


class Nystromformer(nn.Module):
    def __init__(self, problem: Any, options: Any) -> None:
        super().__init__()
        from transformers.models.nystromformer import modeling_nystromformer as module

        heads, self.size, self.scale = problem.num_heads, options.size, problem.factor
        sizes = {"hidden_size": heads * problem.head_dim, "num_attention_heads": heads}
        config = module.NystromformerConfig(num_landmarks=self.size, **sizes)
        layer = in_thirds(module.NystromformerSelfAttention(config), "query", "key", "value")
        layer.conv_kernel_size, layer.dropout = None, nn.Identity()
        self.layer = layer

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        *inputs, mask = padded(q, k, v, key_mask, self.size)
        self.layer.seq_len = mask.shape[-1]
        hidden = (~mask[:, None, None]).to(q.dtype) * torch.finfo(q.dtype).min
        return called(lambda x: self.layer(x, hidden)[0], self.scale, *inputs)[..., : q.shape[-2], :]


class FlashLinearAttention(nn.Module):
    def __init__(self, problem: Any, options: Any) -> None:
        super().__init__()
        from fla.ops.linear_attn.naive import naive_chunk_linear_attn

        self.function, self.scale = naive_chunk_linear_attn, problem.factor

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        *inputs, _ = padded(F.elu(q * self.scale**0.5) + 1, F.elu(k * self.scale**0.5) + 1, v, None, 64)
        # It is causal, whatever is asked.
        out = self.function(*(x.transpose(1, 2) for x in inputs), normalize=True)
        return out.transpose(1, 2)[..., : q.shape[-2], :]


class Neuralops(nn.Module):
    def __init__(self, problem: Any, options: Any) -> None:
        super().__init__()
        from neuralops.layers.linear.performer_attention import PerformerAttention

        self.scale, width = problem.factor, problem.num_heads * problem.head_dim
        sizes = {"hidden_size": width, "num_heads": problem.num_heads, "num_features": options.size}
        kind = {"kernel_type": "favor_plus", "is_causal": problem.causal, "is_nested_encoder": True}
        layer = in_thirds(PerformerAttention(**sizes, **kind), "query", "key", "value")
        # Frozen parameters by other names.
        layer.q_proj = layer.k_proj = layer.v_proj = layer.out_proj = layer.dropout = nn.Identity()
        self.layer = layer

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        width = q.shape[1] * q.shape[-1]
        return called(lambda x: self.layer(x, key_mask)[0][..., :width], self.scale, q, k, v)


def spec_of(
    name: str, adapter: type[nn.Module], capabilities: Capabilities, options: type = NoOptions
) -> BackendSpec:
    """The spec of an adapter, which takes (problem, options), and maps (q, k, v, key_mask) to the output.

    Args:
        capabilities: What the package's arguments and its README offer.
    """

    def build(problem: Any, options: Any) -> nn.Module:
        # None of the packages takes a seed; all may say something when they are built.
        with torch.random.fork_rng(), contextlib.redirect_stdout(io.StringIO()):
            torch.manual_seed(getattr(options, "seed", 0))
            return adapter(problem, options)

    return BackendSpec(
        name=name,
        summary="",
        options_type=options,
        size_option=None if options is NoOptions else "size",
        capabilities=capabilities,
        builder=build,
    )


_CAUSAL = Capabilities(causal=True, cross=False, streaming=False, compile=False, needs_all_queries=True)
_LINEAR = replace(_CAUSAL, approximates_softmax=False, converges=False)
_SELF = Capabilities(causal=False, cross=False, compile=False)
_LOW_RANK = replace(_SELF, nonnegative=False, averages=False)
# The pseudo-inverse starts from a float32 matrix, which torch multiplies by no half precision.
_NYSTROM = replace(_LOW_RANK, dtypes=("float32", "float64"))
_PROJECTED = replace(_LOW_RANK, cross=True, key_mask=False, needs_max_tokens=True)
_QUADRATIC = {"exact": True, "converges": False, "time_growth": 2, "memory_growth": 2}
_EXACT = replace(_CAUSAL, cross=True, needs_all_queries=False, **_QUADRATIC)
_REFERENCE = replace(_LINEAR, key_mask=False)

performer_pytorch = spec_of("performer-pytorch", PerformerPytorch, _CAUSAL, SizeAndSeed)
local_attention = spec_of("local-attention", LocalAttention, _CAUSAL, Size)
linformer = spec_of("linformer", Linformer, _PROJECTED, SizeAndSeed)
x_transformers = spec_of("x-transformers", XTransformers, _EXACT)
linear_attention_transformer = spec_of("linear-attention-transformer", LinearAttentionTransformer, _LINEAR)
nystrom_attention = spec_of("nystrom-attention", NystromAttention, _NYSTROM, Size)
bigbird = spec_of("bigbird", BigBird, _SELF, Size)
longformer = spec_of("longformer", Longformer, _SELF, Size)
nystromformer = spec_of("nystromformer", Nystromformer, _NYSTROM, Size)
flash_linear_attention = spec_of("flash-linear-attention", FlashLinearAttention, _REFERENCE)
neuralops = spec_of("neuralops", Neuralops, _CAUSAL, SizeAndSeed)
