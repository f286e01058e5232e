"""The one subject of a comparison: everything about a backend is measured on the same q, k, v."""

from pathlib import Path

import torch

from efficient_attn.errors import OptionError
from efficient_attn.measure.inputs import TEXTS, Activations, gaussian, read_activations, shipped
from efficient_attn.sweep.subject import Subject
from efficient_attn.sweep.subjects import subjects

# The layer whose rows are sharpest, and the only one of the stitched texts.
_LAYER = 1


def one_subject(
    source: str | Path,
    *,
    layer: int | None,
    tokens: int | None,
    norm: float,
    num_heads: int,
    head_dim: int,
    seed: int,
    dtype: str,
    device: str,
) -> Subject:
    """One layer of the inputs, its first tokens; they are cut, never stretched.

    Args:
        layer: None: layer 1 of what is shipped, the first one of a file.
        tokens: None: all that there are.
        norm: Of Gaussian inputs; so are num_heads and head_dim.

    Raises:
        OptionError, DataError: If there are no such inputs, or fewer tokens.
    """
    if source == "gaussian":
        drawn = gaussian(norm=norm, tokens=tokens or 0, num_heads=num_heads, head_dim=head_dim, seed=seed)
        found = Subject(f"gaussian(norm={norm:g})", drawn, head_dim**-0.5, seed)
    else:
        wanted = _LAYER if layer is None and source in ("encoder", "stitched") else layer
        layers = None if wanted is None else [wanted]
        found = subjects([source], norms=[norm], tokens=1, head_dim=1, layers=layers, seed=seed)[0]
    return Subject(found.name, _first(found, tokens, dtype, device), found.scale, found.seed)


def words_of(source: str | Path, tokens: int) -> tuple[str, ...]:
    """The token strings of the inputs; their numbers where the file does not tell."""
    if source == "encoder":
        found = shipped().tokens
    elif source == "stitched":
        found = tuple(word for text in range(len(TEXTS)) for word in shipped(text).tokens)
    else:
        found = read_activations(source).tokens
    return found if len(found) == tokens else tuple(map(str, range(tokens)))


def _first(subject: Subject, tokens: int | None, dtype: str, device: str) -> Activations:
    """The first tokens of q, k and v."""
    q, k, v = subject.activations
    has = k.shape[-2]
    if q.shape[-2] != has:
        raise OptionError(
            f"inputs {subject.name} have {q.shape[-2]} queries for {has} keys; as many are needed."
        )
    if tokens is not None and tokens > has:
        more = " The shipped inputs stitched have 2048." if subject.name.startswith("encoder") else ""
        raise OptionError(
            f"{tokens} tokens are more than the {has} of {subject.name}; they are cut, never stretched.{more}"
        )
    place = {"dtype": getattr(torch, dtype), "device": device}
    return Activations(*(tensor[..., :tokens, :].to(**place) for tensor in (q, k, v)))
