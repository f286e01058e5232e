"""The key mask and the causality that an attention mask of queries and keys encodes."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class Visible(NamedTuple):
    """The keys that a mask shows.

    Attributes:
        keys: bool [batch k_tokens], True for a real key; None: all are.
        causal: Whether a query sees no later key; queries are the last positions of the keys.
    """

    keys: Tensor | None
    causal: bool


class MaskReader:
    """Reads every entry of a mask once, though layers share it, as the same tensor or as its views."""

    def __init__(self) -> None:
        self._read = WeakTensorKeyDictionary()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """A copy begins without masks."""
        return MaskReader, ()

    def visible(self, mask: Tensor, *, batch: int, q_tokens: int, k_tokens: int) -> Visible | None:
        """The keys that the mask shows; None if it encodes another pattern, or a bias."""
        # A view belongs to its base, which outlives it and counts the changes of both.
        known = self._read.setdefault(mask if mask._base is None else mask._base, {})
        versions = () if mask.is_inference() else (mask._version,)
        place = (mask.storage_offset(), mask.shape, mask.stride(), *versions, batch, q_tokens, k_tokens)
        if place not in known or not versions:
            known[place] = read(mask, batch=batch, q_tokens=q_tokens, k_tokens=k_tokens)
        found: Visible | None = known[place]
        return found


def read(mask: Tensor, *, batch: int, q_tokens: int, k_tokens: int) -> Visible | None:
    """As `MaskReader.visible`, without memory."""
    if mask.ndim > 4:
        return None
    shown = _shown(mask[(None,) * (4 - mask.ndim)])
    if shown is None:
        return None
    if shown.shape[1] > 1:
        if shown.stride(1) and not bool((shown == shown[:, :1]).all()):
            return None
        shown = shown[:, :1]
    keys = shown[:, 0, -1].expand(batch, k_tokens)
    if not shown.stride(-2) or bool((shown == shown[:, :, -1:]).all()):
        return Visible(None if bool(keys.all()) else keys, causal=False)
    if q_tokens > k_tokens or not bool(_fits_triangle(shown, keys, k_tokens).all()):
        return None
    return Visible(None if bool(keys.all()) else keys, causal=True)


def read_compiled(mask: Tensor, *, causal: bool, batch: int, k_tokens: int) -> Tensor:
    """The key mask of a mask whose causality is known, checked when the compiled code runs."""
    shown = mask[(None,) * (4 - mask.ndim)]
    if mask.dtype is not torch.bool:
        shown = shown == 0
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        torch._assert_async((hidden | (mask == 0)).all(), "the mask has entries other than 0 and -inf")
    keys = shown[:, 0, -1].expand(batch, k_tokens)
    fits = _fits_triangle(shown, keys, k_tokens) if causal else shown == keys[:, None, None]
    torch._assert_async(fits.all(), "the mask has another pattern than the mask of the example")
    return keys


def _shown(mask: Tensor) -> Tensor | None:
    """True for a visible key; None if the mask is a bias."""
    if mask.dtype is torch.bool:
        return mask
    shown = mask == 0
    # Libraries hide keys by −inf or by the smallest number of the dtype.
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return shown if bool((shown | hidden).all()) else None


def _fits_triangle(shown: Tensor, keys: Tensor, k_tokens: int) -> Tensor:
    """Rows that are causal over the real keys; a row of padding may also show every key or none."""
    rows = shown.shape[-2]
    triangle = torch.ones(rows, k_tokens, dtype=torch.bool, device=shown.device).tril(k_tokens - rows)
    fits = (shown == (keys[:, None, None] & triangle)).all(dim=-1)
    real_rows = keys[:, None, k_tokens - rows :]
    # Libraries show everything to a row without a visible key, whose softmax would be NaN.
    return fits | (~real_rows & (shown == shown[..., :1]).all(dim=-1))
