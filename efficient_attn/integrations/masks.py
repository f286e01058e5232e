"""Masks of queries and keys, read as a pattern and a key mask."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, CausalVariant

from efficient_attn.ops.alignment import rotated

PATTERN = "its mask is no key mask and not causal"

# Largest entry that hides a key from a row that sees another key.
_HIDDEN = -1e4


class MaskPattern(NamedTuple):
    """Keys i−back … i+ahead visible to position i, or an irregular pattern in words. None: no limit."""

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


FULL, CAUSAL = MaskPattern(None, None), MaskPattern(None, 0)


class ShownKeys(NamedTuple):
    """Keys that a mask shows.

    Attributes:
        key_mask: bool [batch k_tokens], True for a real key; None: all are real.
        causal: Whether a query sees no later key.
        ends: Number of keys up to the last causal query, int64 [batch]; None: all. The only query of a call
            stands at the last visible key.
    """

    key_mask: Tensor | None
    causal: bool
    ends: Tensor | None = None


def keys_to_last_query(
    k: Tensor, v: Tensor, key_mask: Tensor | None, ends: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys, values and key mask that end at the last query, without the empty end of a cache.

    Rows that end before the longest row are rotated, so that their empty slots come first.
    """
    if key_mask is None or ends is None:
        return k, v, key_mask
    lengths = ends.tolist()
    shortest, longest = min(lengths), max(lengths)
    if shortest == k.shape[2]:
        return k, v, key_mask
    k, v, key_mask = k[:, :, :longest], v[:, :, :longest], key_mask[:, :longest]
    if shortest < longest:
        k, v, real = (rotated(x, ends - longest) for x in (k, v, key_mask[:, None, :, None]))
        key_mask = real[:, 0, :, 0]
    return k, v, None if bool(key_mask.all()) else key_mask


def read_mask(mask: Tensor, *, batch: int, q_tokens: int, k_tokens: int) -> ShownKeys | str:
    """Keys that a mask shows, or the reason why no backend can serve it.

    Entries are read anew: NumPy and `.data` change them without a new version in torch's counter.
    """
    if isinstance(mask, CausalBias):
        return _shown_by_bias(mask, q_tokens, k_tokens)
    batched = torch._C._functorch.is_batchedtensor(mask)
    # A subclass may have no entries, and a batch of `vmap` hides its entries.
    if type(mask) not in (Tensor, nn.Parameter) or batched:
        kind = "batch of vmap" if batched else type(mask).__name__
        return f"its mask is a {kind}, whose entries are not read"
    if mask.ndim > 4 or not mask.numel():
        return PATTERN
    mask = mask[(None,) * (4 - mask.ndim)]
    # Heads and rows that are copies of each other are read once.
    mask = mask[:, :1] if not mask.stride(1) else mask
    mask = mask[:, :, :1] if not mask.stride(2) else mask
    shown, legible = _shown_entries(mask)
    if not bool(legible) or (shown.shape[1] > 1 and not bool((shown == shown[:, :1]).all())):
        return PATTERN
    shown = shown[:, 0].expand(-1, -1, k_tokens)
    keys = shown[:, -1].expand(batch, k_tokens)
    key_mask = None if bool(keys.all()) else keys
    # The last query of a growing cache sees the last key.
    filled = q_tokens >= k_tokens or key_mask is None or bool(keys[:, -1].all())
    # Rows of most causal masks already differ at their ends.
    alike = shown.shape[1] == 1 or bool((shown[:, 0] == shown[:, -1]).all())
    if alike and bool((shown == shown[:, -1:]).all()):
        ends = None if filled or q_tokens > 1 else _last_shown(keys).clamp(min=0) + 1
        return ShownKeys(key_mask, causal=False, ends=ends)
    if q_tokens > k_tokens:
        return PATTERN
    first = keys.new_full((1,), k_tokens - q_tokens, dtype=torch.int64) if filled else _first_position(shown)
    if not _fits_triangle(shown, first):
        return PATTERN
    return ShownKeys(key_mask, causal=True, ends=None if filled else first.expand(batch) + q_tokens)


def _shown_by_bias(bias: CausalBias, q_tokens: int, k_tokens: int) -> ShownKeys | str:
    if (bias.seq_len_q, bias.seq_len_kv) != (q_tokens, k_tokens) or q_tokens > k_tokens:
        return PATTERN
    if bias.variant != CausalVariant.LOWER_RIGHT and q_tokens != k_tokens:
        return f"causal_upper_left aligns {q_tokens} queries with the first of {k_tokens} keys"
    return ShownKeys(None, causal=True)


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


def _last_shown(shown: Tensor) -> Tensor:
    """Position of the last visible key of each row, or −1."""
    return torch.where(shown, torch.arange(shown.shape[-1], device=shown.device), -1).amax(dim=-1)


def _first_position(shown: Tensor) -> Tensor:
    """Position of the first of consecutive causal queries, [batch], in a mask [batch queries keys]."""
    queries, tokens = shown.shape[1:]
    # A real query stands at its last visible key, padding behind it. Padding that sees more than the last
    # query says nothing.
    first = _last_shown(shown) - torch.arange(queries, device=shown.device)
    return (first * (shown <= shown[:, -1:]).all(dim=-1)).amax(dim=1).clamp(0, tokens - queries)


def _fits_triangle(shown: Tensor, first: Tensor) -> bool:
    """Whether each row is causal over the real keys, or padding."""
    keys, slot = shown[:, -1], torch.arange(shown.shape[2], device=shown.device)
    position = first[:, None] + torch.arange(shown.shape[1], device=shown.device)
    fits = (shown == (keys[:, None] & (slot <= position[..., None]))).all(dim=-1)
    if bool(fits.all()):
        return True
    # Libraries show everything to a row without a visible key, whose softmax would be NaN. An entry without
    # any key masks rows instead.
    padding_rows = ~keys.gather(1, position.expand(len(keys), -1)) & keys.any(dim=-1, keepdim=True)
    empty = slot > position[:, -1:, None]
    return bool((fits | (padding_rows & ((shown == shown[..., :1]) | empty).all(dim=-1))).all())
