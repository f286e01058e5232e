"""Masks of queries and keys, read as a pattern and a key mask."""

from typing import NamedTuple

import torch
from torch import Tensor

from efficient_attn.ops.softmax.definition import causal_mask

# Largest entry that hides a key from a row that sees another key.
_HIDDEN = -1e4


class Pattern(NamedTuple):
    """Keys i−back … i+ahead visible to position i. None: no limit.

    Attributes:
        irregular: Description of a pattern that is no such range; None: it is one.
    """

    back: int | None
    ahead: int | None
    irregular: str | None = None

    @property
    def causal(self) -> bool:
        return self.ahead == 0

    @property
    def sliding(self) -> bool:
        return self.back is not None

    @property
    def window(self) -> int | None:
        """Option `window` of the backend `window`. None: no window."""
        if self.back is None or self.ahead is None:
            return None
        return self.back + self.ahead + 1

    def __str__(self) -> str:
        if self.irregular is not None:
            return self.irregular
        kind = "causal" if self.causal else "bidirectional"
        return f"{kind} over {self.window} keys" if self.sliding else f"{kind} over all keys"


FULL, CAUSAL = Pattern(None, None), Pattern(None, 0)


class ShownKeys(NamedTuple):
    """Keys that a mask shows.

    Attributes:
        key_mask: bool [batch k_tokens], True for a real key; None: all are.
        causal: Whether a query sees no later key; queries are the last positions of the keys.
    """

    key_mask: Tensor | None
    causal: bool


def read_mask(mask: Tensor, *, batch: int, q_tokens: int, k_tokens: int) -> ShownKeys | None:
    """Keys that a mask shows. None for other patterns and biases.

    Every call reads the entries: NumPy and `.data` change them without a trace in torch's version counter.
    """
    if mask.ndim > 4 or not mask.numel():
        return None
    mask = mask[(None,) * (4 - mask.ndim)]
    # Heads and rows that are copies of each other are read once.
    mask = mask[:, :1] if not mask.stride(1) else mask
    mask = mask[:, :, :1] if not mask.stride(2) else mask
    shown, legible = _shown_entries(mask)
    if not bool(legible) or (shown.shape[1] > 1 and not bool((shown == shown[:, :1]).all())):
        return None
    shown = shown[:, :1]
    keys = shown[:, 0, -1].expand(batch, k_tokens)
    key_mask = None if bool(keys.all()) else keys
    # Rows of most causal masks already differ at their ends.
    if bool((shown[:, :, 0] == shown[:, :, -1]).all()) and bool((shown == shown[:, :, -1:]).all()):
        return ShownKeys(key_mask, causal=False)
    if q_tokens > k_tokens or not bool(_fits_triangle(shown, keys, k_tokens).all()):
        return None
    return ShownKeys(key_mask, causal=True)


def _shown_entries(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Visible keys, and whether all entries show or hide a key."""
    if mask.dtype is torch.bool:
        return mask, torch.ones((), dtype=torch.bool, device=mask.device)
    shown = ~mask.bool()
    # Libraries hide keys by −inf, the smallest number of the dtype, −1e9 or −10000. A row that adds −10000 to
    # all its scores hides none of them.
    largest = mask.amax(dim=-1)
    in_rows = (largest == 0) | (largest <= torch.finfo(mask.dtype).min / 2)
    return shown, (shown | (mask <= _HIDDEN)).all() & in_rows.all()


def _fits_triangle(shown: Tensor, keys: Tensor, k_tokens: int) -> Tensor:
    """Rows that are causal over the real keys, or padding."""
    rows = shown.shape[-2]
    fits = (shown == (keys[:, None, None] & causal_mask(rows, k_tokens, shown.device))).all(dim=-1)
    # Libraries show everything to a row without a visible key, whose softmax would be NaN. An entry without
    # any key is a mask of rows.
    padding_rows = ~keys[:, None, k_tokens - rows :] & keys.any(dim=-1)[:, None, None]
    return fits | (padding_rows & (shown == shown[..., :1]).all(dim=-1))
