"""One call of `F.scaled_dot_product_attention`, and the mode that receives the calls of a model."""

import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from efficient_attn.backend import Backend
from efficient_attn.integrations.intercept.masks import Visible
from efficient_attn.problem import AttentionProblem

SDPA = F.scaled_dot_product_attention
WEIGHTS_ASKED = "its caller asks for the weights (need_weights=True)"
CALL_SDPA = (
    "a model from transformers needs attn_implementation='sdpa', nn.MultiheadAttention need_weights=False, "
    "and code with its own softmax must call F.scaled_dot_product_attention instead"
)


@dataclass(frozen=True, kw_only=True)
class Call:
    """Arguments of one call; `attn_mask` is bool, True for a visible key, or a bias of the scores."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @classmethod
    def of(cls, args: tuple[Any, ...], options: dict[str, Any]) -> "Call":
        """The call with these arguments, positional ones in torch's order."""
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        # The compiler of torch 2.8 ends a zip of unequal lengths with an error, whatever `strict` says.
        return cls(**dict(zip(names[: len(args)], args, strict=True)), **options)

    def exact(self) -> Tensor:
        """The output of torch's own function."""
        return SDPA(
            self.query,
            self.key,
            self.value,
            self.attn_mask,
            self.dropout_p,
            self.is_causal,
            scale=self.scale,
            enable_gqa=self.enable_gqa,
        )

    @property
    def factor(self) -> float:
        """Factor on q·k."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as [batch heads tokens dim], in the dtype of autocast.

        Tensors without heads get one; a batch of one entry serves every entry of the others.
        """
        q, k, v = (x[:, None] if x.ndim == 3 else x for x in (self.query, self.key, self.value))
        if torch.is_autocast_enabled(q.device.type):
            q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
        if q.ndim == k.ndim == v.ndim == 4:
            batch = torch.broadcast_shapes(q.shape[:1], k.shape[:1], v.shape[:1])
            q, k, v = (x.expand(*batch, *x.shape[1:]) for x in (q, k, v))
        return q, k, v

    @property
    def mask(self) -> Tensor | None:
        """`attn_mask` with the axis of heads that `tensors` have."""
        mask = self.attn_mask
        return mask[:, None] if mask is not None and self.query.ndim == mask.ndim == 3 else mask

    def served(self, backend: Backend, visible: Visible) -> Tensor:
        """The output of a backend without a mismatch, with the scale of the call."""
        q, k, v = self.tensors
        if self.factor != backend.problem.factor:
            # As in feature maps, queries and keys each take the square root, and queries the sign.
            ratio = self.factor / backend.problem.factor
            root = math.sqrt(abs(ratio))
            q, k = q * math.copysign(root, ratio), k * root
        output = backend(q, k, v, key_mask=visible.keys)
        return output[:, 0] if self.query.ndim == 3 else output

    def mismatch(self, problem: AttentionProblem, causal: bool) -> str | None:
        """Reason for which a backend of that problem does not serve the call, which is causal or not."""
        # The only query of a decoding step sees every key, causal or not.
        if causal != problem.causal and self.query.shape[-2] != 1:
            return "its causality is not that of the example"
        if problem.factor == 0 and self.factor != 0:
            return f"its scale is {self.factor:g}, that of the example 0"
        return None

    @property
    def refusal(self) -> str | None:
        """Reason for which no backend serves the call, apart from its mask."""
        if self.query.is_nested:
            return "its tensors are nested"
        q_tokens, k_tokens = self.query.shape[-2], self.key.shape[-2]
        if not self.query.ndim == self.key.ndim == self.value.ndim:
            axes = f"{self.query.ndim}, {self.key.ndim} and {self.value.ndim}"
            return f"its queries, keys and values have {axes} axes"
        if self.query.ndim not in (3, 4):
            return f"its tensors have {self.query.ndim} axes"
        if self.attn_mask is not None and self.attn_mask.requires_grad:
            return "its mask is learned (it requires a gradient)"
        if self.dropout_p:
            return f"it drops attention weights (dropout_p={self.dropout_p:g})"
        if self.is_causal and q_tokens != k_tokens:
            return f"is_causal aligns {q_tokens} queries with the first of {k_tokens} keys"
        return None


class AttentionMode(TorchFunctionMode):
    """Passes calls of attention to `attend`, also inside `nn.MultiheadAttention`."""

    def attend(self, call: Call) -> Tensor:
        """Output of a call; the mode is off meanwhile."""
        raise NotImplementedError

    def unreached(self, reason: str) -> None:
        """Take notice of an attention that does not call `F.scaled_dot_product_attention`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        kinds: Any,
        args: tuple[Any, ...] = (),
        options: dict[str, Any] | None = None,
    ) -> Any:
        options = options or {}
        if func is SDPA:
            return self.attend(Call.of(args, options))
        if func is F.multi_head_attention_forward:
            if options.get("need_weights", True):
                self.unreached(WEIGHTS_ASKED)
            with _Again(self):
                return _MULTI_HEAD(*args, **options)
        # The compiler cannot follow the method, which calls its parent class, inside a mode.
        return (torch.unflatten if func is Tensor.unflatten else func)(*args, **options)


class _Again(TorchFunctionMode):
    """A mode inside its own call: torch turns it off there, and calls of attention would not be seen."""

    def __init__(self, mode: AttentionMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), options: Any = None) -> Any:
        return self._mode.__torch_function__(func, kinds, args, options)


def _composite(function: Any) -> Callable[..., Any]:
    """A function of torch that is computed under a mode instead of being handed to it once more.

    Its check of the mask's shape, which the compiler cannot follow under a mode, is left to the operators.
    """
    names = {
        **function.__globals__,
        "has_torch_function": lambda tensors: False,
        "_check_key_padding_mask": lambda mask, k_tokens, batch: None,
    }
    code, defaults = function.__code__, function.__defaults__
    return types.FunctionType(code, names, function.__name__, defaults, function.__closure__)


_MULTI_HEAD = _composite(F.multi_head_attention_forward)
