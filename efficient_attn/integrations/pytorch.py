"""`nn.MultiheadAttention` with any backend: constructor, call, return value and parameters as in torch."""

from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_attn.backend import Backend, check_whole
from efficient_attn.backends import build, resolve
from efficient_attn.errors import OptionError, UnsupportedError
from efficient_attn.integrations.pytorch_checks import check_call
from efficient_attn.integrations.pytorch_masks import Masks, added, read_masks
from efficient_attn.ops.softmax.biased import biased_attention, biased_weights
from efficient_attn.ops.softmax.definition import apply_weights, causal_mask
from efficient_attn.ops.softmax.fused import fused_attention
from efficient_attn.options import probability
from efficient_attn.problem import positive_count
from efficient_attn.sharding import check_alone


class MultiheadAttention(nn.MultiheadAttention):
    """Concat(head_1 … head_h) W_O, each head computed by a backend (Vaswani et al. 2017, section 3.2.2).

    State dicts of `torch.nn.MultiheadAttention` load into this class; the backend keeps its own state if the
    state dict has no entries for it. Fully-masked rows give zeros before `out_proj`.

    Args:
        embed_dim, num_heads, dropout, bias, kdim, vdim, batch_first, device, dtype: As in torch. A dropout
            above 0 requires a backend with attention weights, 'exact' or 'exact-dense'.
        add_bias_kv, add_zero_attn: Not supported.
        backend: Any argument of `build`: a name, file.py:object, a module or a function.
        causal: Causal attention. Every call has to request it too, by `is_causal` or an `attn_mask`, as in
            torch.
        max_tokens: Maximum sequence length, for backends that require it.
        options: Options of the backend.

    Attributes:
        backend: Attention of q, k and v [batch heads tokens head_dim].
    """

    backend: Backend

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        backend: Any = "exact",
        causal: bool = False,
        max_tokens: int | None = None,
        **options: Any,
    ) -> None:
        positive_count("embed_dim", embed_dim)
        positive_count("num_heads", num_heads)
        if embed_dim % num_heads:
            raise OptionError(f"embed_dim={embed_dim} is not divisible by num_heads={num_heads}.")
        if add_bias_kv or add_zero_attn:
            name = "add_bias_kv" if add_bias_kv else "add_zero_attn"
            raise UnsupportedError(
                f"{name}=True adds a key, which no backend supports: use torch.nn.MultiheadAttention."
            )
        # Built before super().__init__(), so that a refusal has no side effects.
        built = build_for(
            backend,
            embed_dim // num_heads,
            num_heads,
            dropout=dropout,
            causal=causal,
            max_tokens=max_tokens,
            **options,
        )
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            kdim=kdim,
            vdim=vdim,
            batch_first=batch_first,
            device=device,
            dtype=dtype,
        )
        use_backend(self, built)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # A state dict of torch's class has no entries for the backend, which keeps its own.
        entries = {f"{prefix}backend.{name}": value for name, value in self.backend.state_dict().items()}
        if entries.keys().isdisjoint(state_dict):
            state_dict.update(entries)
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
        """The output in query's layout, and the weights or None; arguments and masks as in torch.

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
        check_call(self, query, key, value, need_weights)
        batched = query.ndim == 3
        if key_padding_mask is not None and not batched and key_padding_mask.ndim == 1:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        rows = self._rows(query, key, value, batched)
        masks = read_masks(
            self.backend,
            key_padding_mask,
            attn_mask,
            is_causal,
            need_weights=need_weights,
            num_heads=self.num_heads,
            queries=rows[0],
            keys=rows[1],
        )
        heads, weights = self._attend(self._project(*rows), masks, need_weights)
        output = self.out_proj(heads.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return (output if self.batch_first else output.transpose(0, 1)), weights

    def _rows(
        self, query: Tensor, key: Tensor, value: Tensor, batched: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All three as [batch tokens dim]; tensors that were one object remain one."""
        if batched and self.batch_first:
            return query, key, value
        axis = (lambda x: x.transpose(0, 1)) if batched else (lambda x: x.unsqueeze(0))
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

    def _attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], masks: Masks, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Output of all heads [batch heads queries head_dim], and the weights if requested."""
        key_mask, bias, causal = masks
        if bias is None and not need_weights and causal == self.backend.problem.causal:
            return self.backend(*qkv, key_mask=key_mask), None
        # Only exact backends get here, for which weights and patterns are defined for every kernel.
        if getattr(self.backend.options, "max_distance", 0):
            raise UnsupportedError(
                "A layer with max_distance returns no weights and takes no mask but its own pattern: build "
                "it with causal=True for the causal mask, or without max_distance."
            )
        q, k, v = qkv
        check_alone()
        check_whole(q=q, k=k, v=v, key_mask=key_mask)
        scale, dropout = self.backend.problem.factor, self.dropout if self.training else 0.0
        if bias is None and not need_weights:
            out = fused_attention(q, k, v, scale=scale, causal=causal, key_mask=key_mask, dropout=dropout)
            return out, None
        if causal:
            later = added(~causal_mask(q.shape[2], k.shape[2], q.device), q)
            bias = later if bias is None else later + bias
        if bias is not None and not need_weights:
            out = biased_attention(q, k, v, scale=scale, bias=bias, key_mask=key_mask, dropout=dropout)
            return out, None
        weights = F.dropout(biased_weights(q, k, scale=scale, bias=bias, key_mask=key_mask), dropout)
        return apply_weights(weights, v, key_mask=key_mask).to(q.dtype), weights.to(q.dtype)


def build_for(
    backend: Any, head_dim: int, num_heads: int, *, dropout: float, causal: bool, **options: Any
) -> Backend:
    """Build the backend of a layer, with torch's dropout as its option if it has attention weights.

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
    """Install a backend in a torch layer, in place: parameters, hooks and references to it remain."""
    layer.__class__ = MultiheadAttention
    weight = layer.out_proj.weight
    layer.add_module("backend", backend.to(device=weight.device, dtype=weight.dtype).train(layer.training))
    # In evaluation torch's encoder layer bypasses forward for a fused path, unless query, key and value have
    # separate projections, as this attribute claims.
    layer._qkv_same_embed_dim = False
