"""Exact attention as the code of a model defines it, for features that no kernel of this package has.

Capped scores and attention sinks go through the eager function of the model's own file; position biases,
packed sequences and other masks of queries and keys through transformers' sdpa function.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from efficient_attn.errors import UnsupportedError
from efficient_attn.integrations.transformers.masks import Mask
from efficient_attn.integrations.transformers.patterns import Pattern

# Attribute that attaches the layer of a StateCache to its keys.
STATE = "_efficient_attn_state"

# Arguments of attention functions that change the scores, by the function that computes them.
_EAGER = {
    "softcap": "caps its scores (softcap)",
    "s_aux": "has attention sinks (s_aux)",
    "sinks": "has attention sinks (sinks)",
}
_SDPA = {
    "position_bias": "adds a position bias to its scores (position_bias)",
    "cu_seq_lens_q": "packs sequences into one row (cu_seq_lens_q)",
    "cu_seq_lens_k": "packs sequences into one row (cu_seq_lens_k)",
}


def beyond_backends(pattern: Pattern, others: dict[str, Any]) -> str | None:
    """The feature of a call that only exact attention supports, in words; None if it has none."""
    words = _features(_EAGER | _SDPA, others)
    if words:
        return words[0]
    return None if pattern.other is None else f"reads {pattern.other}"


def _features(known: dict[str, str], others: dict[str, Any]) -> list[str]:
    return [words for name, words in known.items() if others.get(name) is not None]


def attend_as_written(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    is_causal: bool | None,
    others: dict[str, Any],
) -> Tensor:
    """The output in transformers' layout, [batch tokens heads value_dim].

    Raises:
        UnsupportedError: If the model has no such function, or its keys are in a state.
    """
    if getattr(key, STATE, None) is not None:
        raise UnsupportedError(
            f"{type(module).__name__} has scores or a mask that no state supports; use transformers' own "
            "cache."
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    pairs = mask.written().to(key.device) if isinstance(mask, Mask) else mask
    packed = _packed(query, key, others)
    if pairs is None and causal and (packed is not None or _features(_EAGER, others)):
        pairs = _triangle(query, key)
    if packed is not None:
        pairs = packed if pairs is None else _both(pairs, packed)
    if _features(_EAGER, others):
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        added = pairs if pairs is None or pairs.dtype != torch.bool else _added(pairs, query)
        return _eager(module)(module, query, key, value, added, scaling=scaling, dropout=dropout, **others)[0]
    bias = {"position_bias": others.get("position_bias")}
    return sdpa_attention_forward(
        module, query, key, value, pairs, dropout=dropout, scaling=scaling, is_causal=is_causal, **bias
    )[0]


def _eager(module: Any) -> Callable[..., tuple[Tensor, Any]]:
    """The function with which the code of a module falls back to written-out attention."""
    code: Any = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    names = vars(sys.modules[type(module).__module__])
    known = [names[name] for name in code.co_names if "eager" in name and callable(names.get(name))]
    if not known:
        raise UnsupportedError(
            f"{type(module).__name__} has no eager attention function that computes its scores."
        )
    found: Callable[..., tuple[Tensor, Any]] = known[0]
    return found


def _triangle(query: Tensor, key: Tensor) -> Tensor:
    """Causal pairs of query and key; queries are the last positions of the keys."""
    queries, keys = query.shape[2], key.shape[2]
    pairs = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=query.device)
    return pairs.tril(keys - queries)


def _both(pairs: Tensor, allowed: Tensor) -> Tensor:
    """The mask without the pairs that are not allowed."""
    if pairs.dtype == torch.bool:
        return pairs & allowed
    return pairs.masked_fill(~allowed, torch.finfo(pairs.dtype).min)


def _added(pairs: Tensor, query: Tensor) -> Tensor:
    """The mask that is added to the scores."""
    hidden = torch.finfo(query.dtype).min
    return torch.zeros(pairs.shape, dtype=query.dtype, device=query.device).masked_fill(~pairs, hidden)


def _packed(query: Tensor, key: Tensor, others: dict[str, Any]) -> Tensor | None:
    """The pairs of query and key in the same sequence, from cumulative lengths; None without these."""
    q_ends, k_ends = others.get("cu_seq_lens_q"), others.get("cu_seq_lens_k")
    if q_ends is None and k_ends is None:
        return None
    q_row = _sequence(query, k_ends if q_ends is None else q_ends)
    k_row = _sequence(key, q_ends if k_ends is None else k_ends)
    return (q_row[:, None] == k_row)[None, None]


def _sequence(x: Tensor, ends: Any) -> Tensor:
    """Number of the sequence of every token."""
    return torch.bucketize(torch.arange(x.shape[2], device=x.device), ends.to(x.device), right=True)
