"""Attention functions with the signatures of other libraries, as backends with declared promises."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from efficient_attn.errors import DtypeError, OptionError, UnsupportedError
from efficient_attn.external import BARE, label_of, object_at
from efficient_attn.options import one_of
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import BackendSpec, NoOptions, add_spec


def _plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, problem: AttentionProblem) -> dict[str, Any]:
    """f(q, k, v), with key_mask= and causal= where they are wanted."""
    options: dict[str, Any] = {} if mask is None else {"key_mask": mask}
    return {**options, "causal": True} if problem.causal else options


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, problem: AttentionProblem) -> dict[str, Any]:
    """F.scaled_dot_product_attention: attn_mask, is_causal, scale, enable_gqa."""
    options: dict[str, Any] = {"scale": problem.scale, "enable_gqa": k.shape[1] != q.shape[1]}
    square = q.shape[-2] == k.shape[-2]
    if mask is None and problem.causal and square:
        return {**options, "is_causal": True}
    shown = None if mask is None else mask[:, None, None]
    if problem.causal:
        # is_causal aligns the first query with the first key, and excludes attn_mask.
        rows, keys = q.shape[-2], k.shape[-2]
        triangle = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
        shown = triangle if shown is None else shown & triangle
    return {**options, "attn_mask": shown}


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, problem: AttentionProblem) -> dict[str, Any]:
    """flash_attn_func: causal, softmax_scale."""
    return {"causal": problem.causal, "softmax_scale": problem.scale}


def _fla(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, problem: AttentionProblem) -> dict[str, Any]:
    """Linear attention of flash-linear-attention: scale; always causal, returns the output and a state."""
    return {} if problem.scale is None else {"scale": problem.scale}


# Arguments of a call by signature, and whether tensors are [batch, tokens, heads, dim].
SIGNATURES: dict[str, tuple[Callable[..., dict[str, Any]], bool]] = {
    "plain": (_plain, False),
    "sdpa": (_sdpa, False),
    "flash-attn": (_flash, True),
    "fla": (_fla, True),
}
_NO_KEY_MASK = ("flash-attn", "fla")


class AdaptedAttention(nn.Module):
    """Core of a backend that calls a function by the signature of its library.

    Attributes:
        takes_scale: Whether the signature has a factor on q·k.
    """

    def __init__(
        self, function: Callable[..., Any], signature: str, problem: AttentionProblem, grouped: bool
    ) -> None:
        super().__init__()
        self.function, self._problem, self._grouped = function, problem, grouped
        self._arguments, self._transposed = SIGNATURES[signature]
        self.takes_scale = signature != "plain"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        if not self._grouped:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        options = self._arguments(q, k, v, key_mask, self._problem)
        tensors = [x.transpose(1, 2) for x in (q, k, v)] if self._transposed else [q, k, v]
        output = self.function(*tensors, **options)
        output = output[0] if isinstance(output, tuple) else output
        return output.transpose(1, 2) if self._transposed else output


def adapt(
    function: Any,
    *,
    signature: str = "plain",
    causal: bool = False,
    key_mask: bool = False,
    cross: bool = False,
    grouped: bool = False,
    exact: bool = False,
    backward: bool = True,
) -> BackendSpec:
    """The spec of a function with the signature of another library, with the declared promises.

    Capabilities that are not declared stay unknown: checks that need them are not made.

    Args:
        function: f(q, k, v, …), or its address file.py:object.
        signature: "plain" (key_mask=, causal=), "sdpa" (F.scaled_dot_product_attention), "flash-attn"
            (flash_attn_func) or "fla" (linear attention of flash-linear-attention).
        causal: Whether causality is promised; always, for "fla".
        key_mask: Whether key masks are promised.
        cross: Whether another number of keys than of queries is promised.
        grouped: Whether the function takes fewer key heads itself; otherwise they are repeated for it.
        exact: Whether the output is promised to be that of softmax attention.
        backward: Whether gradients are promised.

    Raises:
        UnknownNameError: If the signature does not exist.
        UnsupportedError: If the signature has no place for a key mask.
    """
    one_of("signature", signature, SIGNATURES)
    if key_mask and signature in _NO_KEY_MASK:
        raise UnsupportedError(f"The signature {signature!r} takes no key mask: leave key_mask out.")
    if signature == "fla" and not causal:
        raise OptionError("The signature 'fla' is causal: declare causal=True.")
    called, name = function, getattr(function, "__name__", type(function).__name__)
    if isinstance(function, str):
        called, name = object_at(function)[1], label_of(function)
    if isinstance(called, type) or not callable(called):
        raise DtypeError(f"A function f(q, k, v, …) or its address file.py:object is wanted, not {called!r}.")
    capabilities = replace(
        BARE,
        causal=causal,
        streaming=False,
        key_mask=key_mask,
        cross=cross,
        exact=exact,
        nonnegative=exact,
        averages=exact,
        gradients=backward,
    )
    return BackendSpec(
        name=name,
        summary=f"A function with the signature of {signature}.",
        options_type=NoOptions,
        capabilities=capabilities,
        builder=lambda problem, options: AdaptedAttention(called, signature, problem, grouped),
        outside=True,
    )


def register(
    name: str,
    *,
    causal: bool = False,
    key_mask: bool = False,
    cross: bool = False,
    exact: bool = False,
    paper: str | None = None,
    formula: str | None = None,
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register the decorated function of (q, k, v) as a backend under `name`, with the declared promises.

    Backends with options, parameters or states are registered by `efficient_attn.registry.register`.

    Args:
        causal, key_mask, cross, exact: Promises, as of `adapt`.

    Raises:
        RuntimeError: If another function or builder has the name.
    """

    def add(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        spec = adapt(function, causal=causal, key_mask=key_mask, cross=cross, exact=exact)
        summary = (inspect.getdoc(function) or name).partition("\n")[0]
        add_spec(replace(spec, name=name, summary=summary, paper=paper, formula=formula, function=function))
        return function

    return add
