"""`nn.MultiheadAttention` with any backend: call, return value and parameters as in torch."""

from dataclasses import fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_attn.backend import Backend, check_whole
from efficient_attn.backends import build, resolve
from efficient_attn.errors import DtypeError, ShapeError, UnsupportedError
from efficient_attn.ops.softmax.definition import (
    apply_weights,
    biased_attention,
    biased_weights,
    causal_mask,
)
from efficient_attn.ops.softmax.fused import fused_attention
from efficient_attn.options import probability
from efficient_attn.sharding import check_alone


class Masks(NamedTuple):
    """Masking that a call requests beyond the pattern of its backend.

    Attributes:
        key_mask: bool [batch keys], True for a real token; None: all keys are real.
        bias: Float mask that is added to the scores, broadcastable to [batch heads queries keys]; only
            exact attention supports it.
        causal: Whether queries read no later keys, in addition to the bias.
    """

    key_mask: Tensor | None
    bias: Tensor | None
    causal: bool


class MultiheadAttention(nn.MultiheadAttention):
    """The class of a layer of torch whose heads are computed by a backend, in place.

    State dicts of `torch.nn.MultiheadAttention` load into this class; the backend keeps its state if the
    state dict has no entries for it. Fully-masked rows give zeros before `out_proj`. Every call of a causal
    layer has to request causality, by `is_causal` or an `attn_mask`, as in torch.

    Attributes:
        backend: Attention of q, k and v [batch heads tokens head_dim].
    """

    backend: Backend

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # A state dict of torch's class has no entries for the backend, which keeps its state.
        stored = {f"{prefix}backend.{name}": value for name, value in self.backend.state_dict().items()}
        if stored.keys().isdisjoint(state_dict):
            state_dict.update(stored)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Output in query's layout and weights or None, as in torch.

        Args:
            query: [queries batch embed_dim], or [batch queries embed_dim] if batch_first, or one
                sequence [queries embed_dim].
            key: Likewise, with kdim features.
            value: Likewise, with vdim features.
            key_padding_mask: [batch keys], True for padding, or a float mask that is added to the scores.
            need_weights: Whether to return the weights, [batch queries keys]; exact backends only.
            attn_mask: [queries keys] or [batch · num_heads queries keys], True where masked, or a float
                mask that is added to the scores. Only exact backends take masks other than the causal one.
            average_attn_weights: False returns the weights per head, [batch num_heads queries keys].
            is_causal: Hint that attn_mask is the causal mask, which may then be omitted.

        Raises:
            UnsupportedError: If the backend does not support an argument.
            ShapeError, DtypeError: If an argument has the wrong shape or dtype.
        """
        self._check_call(query, key, value, need_weights)
        batched = query.ndim == 3
        if key_padding_mask is not None and not batched and key_padding_mask.ndim == 1:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        rows = self._rows(query, key, value)
        masks = self._read_masks(
            rows[0], rows[1].shape[1], key_padding_mask, attn_mask, is_causal, need_weights
        )
        heads, weights = self._attend(self._project(*rows), masks, need_weights)
        output = self.out_proj(heads.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return (output if self.batch_first else output.transpose(0, 1)), weights

    def _check_call(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool) -> None:
        """Refuse arguments that the layer or its backend does not support."""
        if need_weights and not self.backend.spec.capabilities.exact:
            raise UnsupportedError(
                f"Backend {self.backend.spec.name!r} computes no weights: pass need_weights=False (torch's "
                "default is True). layer.backend.attention_weights(q, k) returns its implied weights."
            )
        dropout = getattr(self.backend.options, "dropout", 0.0)
        if self.dropout != dropout:
            raise UnsupportedError(
                f"dropout is {self.dropout} and the backend was built with {dropout}: "
                "it is fixed when the layer is built or replaced."
            )
        for name, x, dim in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            if x.is_nested:
                raise UnsupportedError(
                    f"{name} is a nested tensor, which no backend supports: pad it and pass "
                    "key_padding_mask; an enclosing nn.TransformerEncoder needs use_nested_tensor=False."
                )
            if not x.is_floating_point():
                raise DtypeError(f"{name} is {x.dtype}; expected floating-point embeddings.")
            if x.ndim not in (2, 3) or x.ndim != query.ndim or x.shape[-1] != dim:
                axes = "[batch, tokens, dim]" if self.batch_first else "[tokens, batch, dim]"
                raise ShapeError(
                    f"{name} has shape {list(x.shape)}; all three are {axes}, or all [tokens, dim], {name} "
                    f"with dim={dim}."
                )
        if key.shape[:-1] != value.shape[:-1]:
            raise ShapeError(f"key has shape {list(key.shape)} and value {list(value.shape)}: tokens differ.")

    def _rows(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs as [batch tokens dim]. Equal objects stay equal."""
        if query.ndim == 3 and self.batch_first:
            return query, key, value
        axis = (lambda x: x.transpose(0, 1)) if query.ndim == 3 else (lambda x: x.unsqueeze(0))
        first = axis(query)
        second = first if key is query else axis(key)
        return first, second, second if value is key else axis(value)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [batch heads tokens head_dim]."""
        if self.in_proj_weight is not None and query is key and key is value:
            q, k, v = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        else:
            packed = self.in_proj_weight
            apart = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            weights = apart if packed is None else packed.chunk(3)
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            q, k, v = (F.linear(*each) for each in zip((query, key, value), weights, biases, strict=True))
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        return q, k, v

    def _read_masks(
        self,
        queries: Tensor,
        k_tokens: int,
        padding: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        need_weights: bool,
    ) -> Masks:
        """Masks of a call, from queries [batch tokens dim] and torch's two masks."""
        backend, (batch, q_tokens, _) = self.backend, queries.shape
        if padding is not None:
            _check_mask(padding, "key_padding_mask", [(batch, k_tokens)], "[batch, keys]")
        if attn_mask is not None:
            shapes = [(q_tokens, k_tokens), (batch * self.num_heads, q_tokens, k_tokens)]
            axes = "[queries, keys] or [batch · num_heads, queries, keys]"
            _check_mask(attn_mask, "attn_mask", shapes, axes)
        key_mask, key_bias = _padding(backend, padding)
        # As in torch's layer, the hint replaces the mask in a call without padding and weights.
        hint = attn_mask is None or (padding is None and not need_weights)
        if backend.spec.capabilities.exact and is_causal and hint and q_tokens == k_tokens:
            return Masks(key_mask, key_bias, causal=True)
        pattern = _pattern_bias(backend, attn_mask, is_causal, q_tokens, k_tokens, queries)
        if pattern is not None and pattern.ndim == 3:
            pattern = pattern.unflatten(0, (batch, self.num_heads))
        biases = [bias for bias in (key_bias, pattern) if bias is not None]
        causal = backend.problem.causal and pattern is None
        return Masks(key_mask, sum(biases[1:], biases[0]) if biases else None, causal)

    def _attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], masks: Masks, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Output of all heads [batch heads queries head_dim], and the weights if requested."""
        key_mask, bias, causal = masks
        if bias is None and not need_weights and causal == self.backend.problem.causal:
            return self.backend(*qkv, key_mask=key_mask), None
        # Only exact backends get here, for which weights and patterns are defined for every kernel.
        q, k, v = qkv
        check_alone()
        check_whole(q=q, k=k, v=v, key_mask=key_mask)
        scale, dropout = self.backend.problem.factor, self.dropout if self.training else 0.0
        if bias is None and not need_weights:
            out = fused_attention(q, k, v, scale=scale, causal=causal, key_mask=key_mask, dropout=dropout)
            return out, None
        if causal:
            later = _added_mask(~causal_mask(q.shape[2], k.shape[2], q.device), q)
            bias = later if bias is None else later + bias
        if bias is not None and not need_weights:
            out = biased_attention(q, k, v, scale=scale, bias=bias, key_mask=key_mask, dropout=dropout)
            return out, None
        weights = F.dropout(biased_weights(q, k, scale=scale, bias=bias, key_mask=key_mask), dropout)
        return apply_weights(weights, v, key_mask=key_mask).to(q.dtype), weights.to(q.dtype)


def build_for(
    backend: Any, head_dim: int, num_heads: int, *, dropout: float, causal: bool, **options: Any
) -> Backend:
    """Build the backend of a layer, with torch's dropout.

    Raises:
        UnsupportedError: If the backend has no attention weights to drop.
    """
    probability("dropout", dropout)
    spec = resolve(backend)
    if dropout:
        if all(option.name != "dropout" for option in fields(spec.options_type)):
            raise UnsupportedError(
                f"Backend {spec.name!r} has no attention weights to drop, and dropout is {dropout}: use "
                "dropout=0.0 or backend='exact'."
            )
        options["dropout"] = dropout
    return build(spec, head_dim=head_dim, num_heads=num_heads, causal=causal, **options)


def use_backend(layer: nn.MultiheadAttention, backend: Backend) -> None:
    """Install a backend in a torch layer, in place."""
    layer.__class__ = MultiheadAttention
    weight = layer.out_proj.weight
    layer.add_module("backend", backend.to(device=weight.device, dtype=weight.dtype).train(layer.training))
    # In evaluation torch's encoder layer bypasses forward for a fused path, unless query, key and value have
    # separate projections, as this attribute claims.
    layer._qkv_same_embed_dim = False


def _check_mask(mask: Any, name: str, shapes: list[tuple[int, ...]], axes: str) -> None:
    if not isinstance(mask, Tensor):
        raise DtypeError(f"{name} is a torch tensor {axes}, not {type(mask).__name__}.")
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        raise DtypeError(f"{name} is {mask.dtype}; expected bool, True where masked, or floating.")
    if tuple(mask.shape) not in shapes:
        sizes = " or ".join(str(list(shape)) for shape in shapes)
        raise ShapeError(f"{name} has shape {list(mask.shape)}; expected {axes}, here {sizes}.")


def _padding(backend: Backend, mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Padding as a key mask, or else as a bias of scores."""
    if mask is None or mask.dtype is torch.bool:
        return None if mask is None else ~mask, None
    # torch's own layers pass boolean masks on as −inf and 0.
    real, exact = mask == 0, backend.spec.capabilities.exact
    only_hides = (real | (mask == -torch.inf)).all()
    says = (
        f"key_padding_mask has entries other than 0 and -inf, which backend {backend.spec.name!r} does not "
        "support: pass bool, True for padding, or use backend='exact'."
    )
    if torch.compiler.is_compiling():
        # Entries are unknown to the compiler: exact attention takes any, other backends check at run time.
        if exact:
            return None, mask[:, None, None, :]
        torch._assert_async(only_hides, says)
        return real, None
    if only_hides:
        return real, None
    if not exact:
        raise UnsupportedError(says)
    return None, mask[:, None, None, :]


def _pattern_bias(
    backend: Backend, mask: Tensor | None, is_causal: bool, q_tokens: int, k_tokens: int, like: Tensor
) -> Tensor | None:
    """Bias of the scores. None if the backend applies the pattern."""
    name, built_causal = backend.spec.name, backend.problem.causal
    if mask is None and not is_causal:
        if built_causal:
            raise UnsupportedError(
                "This layer was built with causal=True and the call is not causal: pass "
                "is_causal=True, or build it with causal=False."
            )
        return None
    if mask is None and q_tokens != k_tokens:
        raise ShapeError(
            f"is_causal is ambiguous for {q_tokens} queries and {k_tokens} keys: pass attn_mask."
        )
    # torch documents is_causal as a hint that attn_mask is the causal mask, and relies on it too.
    if built_causal and (
        (is_causal and q_tokens == k_tokens) or _is_triangle(mask, q_tokens, k_tokens, backend)
    ):
        return None
    if mask is not None and backend.spec.capabilities.exact:
        return _added_mask(mask, like)
    if built_causal:
        raise UnsupportedError(
            f"attn_mask is not the causal mask, and backend {name!r} supports no other pattern: "
            "use backend='exact'."
        )
    instead = "causal=True for the causal mask, " if backend.spec.capabilities.causal else ""
    raise UnsupportedError(
        f"This layer was built with causal=False, and backend {name!r} supports no attn_mask: use {instead}"
        "key_padding_mask for padding, or backend='exact' for any pattern."
    )


def _is_triangle(mask: Tensor | None, q_tokens: int, k_tokens: int, backend: Backend) -> bool:
    """Whether a mask is causal, aligned at the last keys."""
    if mask is None:
        return False
    if torch.compiler.is_compiling():
        if backend.spec.capabilities.exact:
            return False
        raise UnsupportedError("Compiled code cannot inspect attn_mask: pass is_causal=True as well.")
    later = ~causal_mask(q_tokens, k_tokens, mask.device)
    return bool((_added_mask(mask, mask) == _added_mask(later, mask)).all())


def _added_mask(mask: Tensor, like: Tensor) -> Tensor:
    """Mask as a bias of the scores: −inf for True."""
    if mask.is_floating_point():
        return mask
    dtype = like.dtype if like.is_floating_point() else torch.float32
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)
