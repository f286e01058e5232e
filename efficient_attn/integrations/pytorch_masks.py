"""Conversion of the masks of `nn.MultiheadAttention`, in which True is masked, to key masks and biases."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from efficient_attn.backend import Backend
from efficient_attn.errors import DtypeError, ShapeError, UnsupportedError
from efficient_attn.ops.softmax.definition import causal_mask


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


def read_masks(
    backend: Backend,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    *,
    need_weights: bool,
    num_heads: int,
    queries: Tensor,
    keys: Tensor,
) -> Masks:
    """Convert both masks of a call; queries and keys are [batch tokens dim], the padding [batch keys].

    Raises:
        UnsupportedError: If the backend does not support a mask.
            ShapeError, DtypeError: If a mask has the wrong shape or dtype.
    """
    batch, q_tokens, k_tokens = len(queries), queries.shape[1], keys.shape[1]
    if key_padding_mask is not None:
        _check(key_padding_mask, "key_padding_mask", [(batch, k_tokens)], "[batch, keys]")
    if attn_mask is not None:
        shapes = [(q_tokens, k_tokens), (batch * num_heads, q_tokens, k_tokens)]
        _check(attn_mask, "attn_mask", shapes, "[queries, keys] or [batch · num_heads, queries, keys]")
    key_mask, key_bias = _padding(backend, key_padding_mask)
    # As in torch's layer, the hint replaces the mask in a call without padding and weights.
    hint = attn_mask is None or (key_padding_mask is None and not need_weights)
    if backend.spec.capabilities.exact and is_causal and hint and q_tokens == k_tokens:
        return Masks(key_mask, key_bias, causal=True)
    pattern = _pattern(backend, attn_mask, is_causal, q_tokens, k_tokens, queries)
    if pattern is not None and pattern.ndim == 3:
        pattern = pattern.unflatten(0, (batch, num_heads))
    biases = [bias for bias in (key_bias, pattern) if bias is not None]
    causal = backend.problem.causal and pattern is None
    return Masks(key_mask, sum(biases[1:], biases[0]) if biases else None, causal)


def _check(mask: Any, name: str, shapes: list[tuple[int, ...]], axes: str) -> None:
    if not isinstance(mask, Tensor):
        raise DtypeError(f"{name} is a torch tensor {axes}, not {type(mask).__name__}.")
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        raise DtypeError(f"{name} is {mask.dtype}; expected bool, True where masked, or floating.")
    if tuple(mask.shape) not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise ShapeError(f"{name} has shape {list(mask.shape)}; expected {axes}, here {wanted}.")


def _padding(backend: Backend, mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The padding as a key mask if possible, else as a bias on each key's scores."""
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


def _pattern(
    backend: Backend, mask: Tensor | None, is_causal: bool, q_tokens: int, k_tokens: int, like: Tensor
) -> Tensor | None:
    """Bias of the scores [… queries keys]; None if the backend applies the pattern itself."""
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
        return added(mask, like)
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
    """Whether a mask is causal, with the queries as the last positions of the keys."""
    if mask is None:
        return False
    if torch.compiler.is_compiling():
        if backend.spec.capabilities.exact:
            return False
        raise UnsupportedError("Compiled code cannot inspect attn_mask: pass is_causal=True as well.")
    later = ~causal_mask(q_tokens, k_tokens, mask.device)
    return bool((added(mask, mask) == added(later, mask)).all())


def added(mask: Tensor, like: Tensor) -> Tensor:
    """The mask as a bias of the scores: −inf for True, 0 for False; float masks unchanged."""
    if mask.is_floating_point():
        return mask
    dtype = like.dtype if like.is_floating_point() else torch.float32
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)
