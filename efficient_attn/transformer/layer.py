"""Multi-head attention: the projections around any backend (Vaswani et al. 2017, section 3.2.2).

Parameters have the names and layout of `torch.nn.MultiheadAttention`: `in_proj_weight` holds the rows of the
queries, then of the keys, then of the values, each head by head. A state dict of one therefore loads into
the other if the backend has no parameters or buffers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_attn.backend import Backend
from efficient_attn.backends import build, resolve
from efficient_attn.errors import DtypeError, OptionError, ShapeError, UnknownNameError, UnsupportedError
from efficient_attn.options import one_of, positive_number
from efficient_attn.problem import positive_count
from efficient_attn.registry import BackendSpec
from efficient_attn.sharding import at_positions, whole_tokens
from efficient_attn.transformer.positions import BASE, check_even, rotate


class ContextKeys(NamedTuple):
    """Projected keys and values of another sequence.

    Attributes:
        k: [batch kv_heads context_tokens head_dim].
        v: The same shape.
        key_mask: bool [batch context_tokens]; None: all tokens are real.
    """

    k: Tensor
    v: Tensor
    key_mask: Tensor | None


class LayerState(NamedTuple):
    """Streaming state of a causal layer after a number of tokens."""

    tokens: int
    backend: Any


class AttentionLayer(nn.Module):
    """Concat(head_1 … head_h) W_O, head_i = attention(x W_Qi, c W_Ki, c W_Vi), with c = x or a context.

    Args:
        backend: Name, file.py:object, module or function, as for `build`.
        num_kv_heads: Number of key and value heads, a divisor of num_heads; None: num_heads.
        head_dim: Size of each head; None: model_dim / num_heads.
        scale: Factor on q·k; None: 1/√head_dim.
        positions: "rotary" rotates q and k; None: no positions.
        rotary_base: Longest wavelength of rotary positions, divided by 2π.
        rotary_scaling: Divisor of rotary positions: length of the model over its trained length.
        qk_norm: Whether each query and key head is divided by its root mean square, times a learned vector
            (Henry et al. 2020; Dehghani et al. 2023, section 2).
        norm_eps: Constant under the root of these norms; None: torch's.

    Attributes:
        in_proj_weight: [(num_heads + 2 num_kv_heads) · head_dim, model_dim]: rows of q, of k, of v.
        in_proj_bias: Bias of these rows, or None.
        out_proj: Output projection, num_heads · head_dim → model_dim.
    """

    in_proj_bias: nn.Parameter | None

    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        backend: Any = "exact",
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        scale: float | None = None,
        causal: bool = False,
        max_tokens: int | None = None,
        bias: bool = True,
        positions: str | None = None,
        rotary_base: float = BASE,
        rotary_scaling: float = 1.0,
        qk_norm: bool = False,
        norm_eps: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        backend = resolve(backend)
        check_arguments(options, (AttentionLayer,), [backend])
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.model_dim, self.head_dim = model_dim, _head_size(model_dim, num_heads, kv_heads, head_dim)
        self._heads = (num_heads, kv_heads, kv_heads)
        positive_number("rotary_base", rotary_base)
        positive_number("rotary_scaling", rotary_scaling)
        self._rotate: Callable[[Tensor, int], Tensor] | None = None
        if positions is not None:
            one_of("positions in a block", positions, ["rotary"])
            check_even("head_dim", self.head_dim, "rotary")
            self._rotate = partial(rotate, base=rotary_base, scaling=rotary_scaling)
        if norm_eps is not None:
            positive_number("norm_eps", norm_eps)
        # Identities have no entries in state dicts.
        self.q_norm = nn.RMSNorm(self.head_dim, eps=norm_eps) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, eps=norm_eps) if qk_norm else nn.Identity()
        rows = sum(self._heads) * self.head_dim
        self.in_proj_weight = nn.Parameter(torch.empty(rows, model_dim))
        self.register_parameter("in_proj_bias", nn.Parameter(torch.zeros(rows)) if bias else None)
        self.out_proj = nn.Linear(num_heads * self.head_dim, model_dim, bias=bias)
        self.backend: Backend = build(
            backend,
            head_dim=self.head_dim,
            num_heads=num_heads,
            max_tokens=max_tokens,
            causal=causal,
            scale=scale,
            **options,
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as torch.nn.Transformer does: Xavier uniform weights, zero biases."""
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.xavier_uniform_(self.out_proj.weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x: Tensor, context: Tensor | None = None, *, key_mask: Tensor | None = None) -> Tensor:
        """Attention of every token of x to x, or to the context, [batch tokens model_dim].

        Args:
            x: [batch tokens model_dim].
            context: Source of keys and values, [batch context_tokens model_dim].
            key_mask: bool, True for a real token of the context, or of x without a context.

        Raises:
            ShapeError, DtypeError: If x, context or mask do not fit each other or the layer.
            UnsupportedError: If the layer does not support a context.
        """
        if context is not None:
            return self.read(x, self.project_context(context, key_mask=key_mask))
        return self._join(self.backend(*self._project(x, key_mask, start=0), key_mask=key_mask))

    def extend(
        self, x: Tensor, state: LayerState | None = None, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, LayerState]:
        """Output of new tokens that follow `state`, and the new state.

        Raises:
            UnsupportedError: If the layer was not built causal or its backend has no incremental decoding.
        """
        start, seen = (0, None) if state is None else state
        q, k, v = self._project(x, key_mask, start=start)
        y, seen = self.backend.extend(q, k, v, seen, key_mask=key_mask)
        return self._join(y), LayerState(start + whole_tokens(x.shape[1]), seen)

    def project_context(self, context: Tensor, *, key_mask: Tensor | None = None) -> ContextKeys:
        """Keys and values of another sequence [batch context_tokens model_dim], for `read`."""
        self.check_reads_context()
        check_sequence("context", context, self.model_dim)
        check_mask("key_mask", key_mask, "context", context)
        # The first rows project queries.
        heads = self._project_rows(context, slice(self._heads[0] * self.head_dim, None))
        k, v = heads.chunk(2, dim=1)
        return ContextKeys(self.k_norm(k), v, key_mask)

    def read(self, x: Tensor, keys: ContextKeys) -> Tensor:
        """Attention of every token of x to a projected context, [batch tokens model_dim]."""
        check_sequence("x", x, self.model_dim)
        q = self.q_norm(self._project_rows(x, slice(self._heads[0] * self.head_dim)))
        return self._join(self.backend(q, keys.k, keys.v, key_mask=keys.key_mask))

    def _project_rows(self, x: Tensor, rows: slice) -> Tensor:
        """Product with rows of the input projection, [batch heads tokens head_dim]."""
        bias = None if self.in_proj_bias is None else self.in_proj_bias[rows]
        heads = F.linear(x, self.in_proj_weight[rows], bias)
        return heads.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _project(self, x: Tensor, key_mask: Tensor | None, *, start: int) -> tuple[Tensor, ...]:
        """q, k and v of x, checked with its mask, as views of one product, [batch heads tokens head_dim]."""
        check_sequence("x", x, self.model_dim)
        check_mask("key_mask", key_mask, "x", x)
        q, k, v = self._project_rows(x, slice(None)).split(self._heads, dim=1)
        q, k = self.q_norm(q), self.k_norm(k)
        if self._rotate is not None:
            q, k = (at_positions(self._rotate, heads, start) for heads in (q, k))
        return q, k, v

    def _join(self, heads: Tensor) -> Tensor:
        return self.out_proj(heads.transpose(1, 2).flatten(2))

    def check_reads_context(self) -> None:
        name = self.backend.spec.name
        if self.backend.problem.causal:
            raise UnsupportedError(
                "A causal layer reads its own tokens and takes no context: build it with causal=False."
            )
        if not self.backend.supports_cross:
            raise UnsupportedError(f"Backend {name!r} cannot read another sequence: it takes no context.")
        if self._rotate is not None:
            raise UnsupportedError(
                "Rotary positions compare tokens of one sequence: a layer that reads a context has none."
            )

    def extra_repr(self) -> str:
        rotary = self._rotate is not None
        return f"model_dim={self.model_dim}, heads of q, k, v: {self._heads}, rotary={rotary}"


def check_sequence(name: str, x: Any, model_dim: int) -> None:
    """Refuse anything but embeddings [batch, tokens, model_dim]."""
    shape = f"[batch, tokens, model_dim={model_dim}]"
    if not isinstance(x, Tensor):
        raise DtypeError(f"{name} is a torch tensor {shape}, not {type(x).__name__}.")
    if not x.is_floating_point():
        raise DtypeError(f"{name} is {x.dtype}; wanted are embeddings {shape}, as nn.Embedding gives them.")
    if x.ndim != 3 or x.shape[-1] != model_dim:
        raise ShapeError(f"{name} has shape {list(x.shape)}; wanted is {shape}.")


def check_mask(name: str, mask: Tensor | None, of: str, x: Tensor) -> None:
    """Refuse a mask of another shape. The backend checks type and dtype."""
    if isinstance(mask, Tensor) and tuple(mask.shape) != tuple(x.shape[:2]):
        raise ShapeError(
            f"{name} has shape {list(mask.shape)} and belongs to the tokens of {of}: it is bool "
            f"[batch, tokens of {of}] = {list(x.shape[:2])}, True for a real token."
        )


def check_arguments(
    options: Mapping[str, Any], modules: Sequence[type], backends: Sequence[BackendSpec]
) -> None:
    """Refuse options of neither the modules nor the backends. The error names the first module."""
    names = {name for module in modules for name in signature(module).parameters} - {"options"}
    names |= {field.name for spec in backends for field in fields(spec.options_type)}
    for option in options:
        if option not in names:
            kind = f"argument of {modules[0].__name__} or option of "
            kind += " and ".join(dict.fromkeys(repr(spec.name) for spec in backends))
            raise UnknownNameError(kind, option, names)


def _head_size(model_dim: int, num_heads: int, kv_heads: int, head_dim: int | None) -> int:
    """Size of each head, from valid sizes of the layer."""
    positive_count("model_dim", model_dim)
    positive_count("num_heads", num_heads)
    positive_count("num_kv_heads", kv_heads)
    if num_heads % kv_heads:
        raise OptionError(f"num_heads={num_heads} is not divided by num_kv_heads={kv_heads}.")
    if head_dim is not None:
        positive_count("head_dim", head_dim)
        return head_dim
    if model_dim % num_heads:
        raise OptionError(f"model_dim={model_dim} is not divided by num_heads={num_heads}: give head_dim.")
    return model_dim // num_heads
