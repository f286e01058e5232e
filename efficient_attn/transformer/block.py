"""Transformer blocks, with each sublayer inside a residual branch.

A post-norm block is LayerNorm(x + sublayer(x)) (Vaswani et al. 2017, section 3.1), a pre-norm block
x + sublayer(LayerNorm(x)) (Xiong et al. 2020), whose stack ends in a final norm.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

from torch import Tensor, nn

from efficient_attn.backends import resolve
from efficient_attn.errors import OptionError, UnsupportedError
from efficient_attn.options import one_of, probability
from efficient_attn.problem import positive_count
from efficient_attn.sharding import check_alone
from efficient_attn.transformer.layer import (
    AttentionLayer,
    ContextKeys,
    LayerState,
    check_arguments,
    check_mask,
)

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu-tanh": partial(nn.GELU, approximate="tanh"),
    "silu": nn.SiLU,
}
# Gated feed-forward networks, named for the activation of the gate.
_GATES: dict[str, Callable[[], nn.Module]] = {"swiglu": nn.SiLU, "geglu": nn.GELU}
NORMS = ("post", "pre")
NORM_TYPES = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
# Names in nn.TransformerEncoderLayer, whose last norm is norm2, and in nn.TransformerDecoderLayer.
_TORCH_ENCODER = {
    "self_attn": "attention",
    "linear1": "feed_forward.up",
    "linear2": "feed_forward.down",
    "norm1": "attention_residual.norm",
    "norm2": "feed_forward_residual.norm",
}
_TORCH_DECODER = {
    **_TORCH_ENCODER,
    "multihead_attn": "cross_attention",
    "norm2": "cross_attention_residual.norm",
    "norm3": "feed_forward_residual.norm",
}


class BlockState(NamedTuple):
    """Streaming state of a block, with the projected context if it has cross-attention."""

    attention: LayerState
    context: ContextKeys | None


@dataclass(frozen=True, kw_only=True)
class BlockOptions:
    """Options of the sublayers of a block.

    Attributes:
        activation: "relu", "gelu", "gelu-tanh", "silu", or of a gated network "swiglu" or "geglu".
        norm: "post", after each residual branch, or "pre", before each.
        norm_type: "layer", or "rms", division by the root mean square (Zhang and Sennrich 2019).
        norm_eps: Constant under the root of the norms; None: torch's.
        dropout: Dropout probability on residual branches, never on attention weights (0.1 in the paper).
    """

    feed_forward_dim: int = 2048
    activation: str = "relu"
    norm: str = "post"
    norm_type: str = "layer"
    norm_eps: float | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        positive_count("feed_forward_dim", self.feed_forward_dim)
        one_of("activation", self.activation, [*_ACTIVATIONS, *_GATES])
        one_of("norm", self.norm, NORMS)
        one_of("norm_type", self.norm_type, NORM_TYPES)
        probability("dropout", self.dropout)

    @classmethod
    def split(cls, options: Mapping[str, Any]) -> tuple["BlockOptions", dict[str, Any]]:
        names = signature(cls).parameters
        chosen = {name: value for name, value in options.items() if name in names}
        return cls(**chosen), {name: value for name, value in options.items() if name not in names}

    def build_norm(self, model_dim: int) -> nn.Module:
        eps = {} if self.norm_eps is None else {"eps": self.norm_eps}
        return NORM_TYPES[self.norm_type](model_dim, **eps)


class Residual(nn.Module):
    """Residual branch around a sublayer: dropout on its output, and the norm before or after."""

    def __init__(self, model_dim: int, options: BlockOptions) -> None:
        super().__init__()
        self.norm = options.build_norm(model_dim)
        self.dropout = nn.Dropout(options.dropout)
        self._before = options.norm == "pre"

    def pre(self, x: Tensor) -> Tensor:
        return self.norm(x) if self._before else x

    def post(self, x: Tensor, y: Tensor) -> Tensor:
        """Output of the branch, from its input x and the output y of the sublayer."""
        x = x + self.dropout(y)
        return x if self._before else self.norm(x)


class FeedForward(nn.Module):
    """activation(x W_1 + b_1) W_2 + b_2, token by token (Vaswani et al. 2017, eq. 2).

    Gated: (activation(x W) ⊙ x V) W_2, without biases (Shazeer 2020, eq. 6).
    """

    def __init__(self, model_dim: int, options: BlockOptions) -> None:
        super().__init__()
        gated = options.activation in _GATES
        self.activation = {**_ACTIVATIONS, **_GATES}[options.activation]()
        self.gate = nn.Linear(model_dim, options.feed_forward_dim, bias=False) if gated else None
        self.up = nn.Linear(model_dim, options.feed_forward_dim, bias=not gated)
        self.down = nn.Linear(options.feed_forward_dim, model_dim, bias=not gated)
        for linear in (self.gate, self.up, self.down):
            if linear is not None:
                nn.init.xavier_uniform_(linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


class TransformerBlock(nn.Module):
    """Self-attention, cross-attention if it has a backend, and feed-forward network.

    Args:
        backend: Backend, as for `build`.
        positions: "rotary" or None; a stack adds the other kinds to embeddings. Cross-attention has none,
            since distances between two sequences are undefined.
        cross_backend: Backend of the cross-attention, with capability `cross`. None: no cross-attention.
        cross_options: Further arguments of the cross-attention layer, including options of its backend;
            head_dim is the self-attention's by default.
        options: Fields of BlockOptions, and further arguments of AttentionLayer: num_kv_heads, head_dim,
            scale, bias, qk_norm, rotary_base, rotary_scaling, options of the backend.
    """

    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        backend: Any = "exact",
        *,
        positions: str | None = None,
        causal: bool = False,
        max_tokens: int | None = None,
        cross_backend: Any = None,
        cross_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        backend = resolve(backend)
        check_arguments(options, (TransformerBlock, BlockOptions, AttentionLayer), [backend])
        sublayers, options = BlockOptions.split(options)
        shared: dict[str, Any] = {"max_tokens": max_tokens, "norm_eps": sublayers.norm_eps}
        self.attention = AttentionLayer(
            model_dim, num_heads, backend, causal=causal, positions=positions, **shared, **options
        )
        self.cross_attention: AttentionLayer | None = None
        if cross_backend is not None:
            arguments = {**shared, "head_dim": options.get("head_dim"), **(cross_options or {})}
            self.cross_attention = AttentionLayer(model_dim, num_heads, cross_backend, **arguments)
            self.cross_attention.check_reads_context()
            self.cross_attention_residual = Residual(model_dim, sublayers)
        self.feed_forward = FeedForward(model_dim, sublayers)
        self.attention_residual = Residual(model_dim, sublayers)
        self.feed_forward_residual = Residual(model_dim, sublayers)
        accept_names(self, _TORCH_ENCODER if cross_backend is None else _TORCH_DECODER)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Map x [batch tokens model_dim] to the same shape.

        Args:
            context: [batch context_tokens model_dim], an encoder's output.
            key_mask: bool [batch tokens], True for a real token of x.
            context_mask: bool [batch context_tokens], True for a real token of the context.

        Raises:
            UnsupportedError: If a context is given to a block without cross-attention.
            OptionError: If a block with cross-attention gets no context.
        """
        keys = self.project_context(context, context_mask)
        y = self.attention(self.attention_residual.pre(x), key_mask=key_mask)
        return self._read_and_feed(self.attention_residual.post(x, y), keys)

    def extend(
        self,
        x: Tensor,
        state: BlockState | None = None,
        context: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> tuple[Tensor, BlockState]:
        """Output of new tokens that follow `state`, and the new state. Only for causal blocks.

        Args:
            context: Context to project and keep in the state; None: the context in the state.
        """
        if context is None and context_mask is None and state is not None:
            keys = state.context
        else:
            keys = self.project_context(context, context_mask)
        if keys is not None:
            # The state would keep the keys of the context on this rank alone.
            check_alone()
        before = None if state is None else state.attention
        y, after = self.attention.extend(self.attention_residual.pre(x), before, key_mask=key_mask)
        y = self._read_and_feed(self.attention_residual.post(x, y), keys)
        return y, BlockState(after, keys)

    def project_context(self, context: Tensor | None, context_mask: Tensor | None) -> ContextKeys | None:
        """Keys and values of the context, or None for a block without cross-attention."""
        if self.cross_attention is None:
            if context is not None or context_mask is not None:
                raise UnsupportedError(
                    "context was given to a block without cross-attention: build it with a cross_backend, "
                    "such as 'exact'."
                )
            return None
        if context is None:
            raise OptionError(
                "This block has cross-attention and was given no context: give context, or build it with "
                "cross_backend=None."
            )
        check_mask("context_mask", context_mask, "context", context)
        return self.cross_attention.project_context(context, key_mask=context_mask)

    def _read_and_feed(self, x: Tensor, keys: ContextKeys | None) -> Tensor:
        if self.cross_attention is not None and keys is not None:
            y = self.cross_attention.read(self.cross_attention_residual.pre(x), keys)
            x = self.cross_attention_residual.post(x, y)
        return self.feed_forward_residual.post(x, self.feed_forward(self.feed_forward_residual.pre(x)))


def accept_names(module: nn.Module, names: Mapping[str, str]) -> None:
    """Load state dicts with other names for children of a module, {name there: name or path here}."""
    # A function of this module, unlike a closure, survives pickling of the model.
    module.register_load_state_dict_pre_hook(partial(_rename, names))


def _rename(
    names: Mapping[str, str], module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Replace names directly after the prefix, in place."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        child, dot, name = key.removeprefix(prefix).partition(".")
        if child in names:
            state_dict[f"{prefix}{names[child]}{dot}{name}"] = state_dict.pop(key)
