"""Inputs of a comparison: all quantities of a backend are measured on the same q, k, v."""

from pathlib import Path

import torch

from efficient_attn.errors import OptionError
from efficient_attn.measure.inputs import TEXTS, Activations, gaussian, read_activations, shipped
from efficient_attn.runner.subject import Subject
from efficient_attn.runner.subjects import subjects

# Default layer for attention maps: the sharpest one.
_LAYER = 1


def layer_subjects(
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
    batch: int = 1,
    causal: bool = False,
) -> tuple[Subject, ...]:
    """All layers of the inputs, cut to their first tokens; inputs are never extended.

    Args:
        layer: A single layer; None: all layers.
        tokens: Number of tokens; None: all.
        norm, num_heads, head_dim: Norm and sizes of Gaussian inputs, which have no layers.
        batch: Number of copies of the inputs.
        causal: Causal masking.

    Raises:
        OptionError, DataError: If the inputs do not exist, are too short, or have layers of different shapes.
    """
    if source == "gaussian":
        drawn = gaussian(norm=norm, tokens=tokens or 0, num_heads=num_heads, head_dim=head_dim, seed=seed)
        found: tuple[Subject, ...] = (Subject(f"gaussian(norm={norm:g})", drawn, head_dim**-0.5, seed),)
    else:
        layers = None if layer is None else [layer]
        found = subjects([source], norms=[norm], tokens=1, head_dim=1, layers=layers, seed=seed)
    shapes = {tuple(tensor.shape for tensor in one.activations) for one in found}
    if len(shapes) > 1:
        raise OptionError(f"layers of {source} differ in shape; name one of them: --layer N, layer=N.")
    return tuple(
        Subject(one.name, _copies(_first(one, tokens, dtype, device), batch), one.scale, one.seed, causal)
        for one in found
    )


def one_subject(source: str | Path, *, layer: int | None, seed: int) -> Subject:
    """One layer of the inputs with all its tokens.

    Args:
        layer: None: layer 1 of the shipped inputs, the first one of a file.
    """
    wanted = _LAYER if layer is None and source in ("encoder", "stitched") else layer
    layers = None if wanted is None else [wanted]
    found = subjects([source], norms=[1.0], tokens=1, head_dim=1, layers=layers, seed=seed)[0]
    return Subject(found.name, _first(found, None, "float32", "cpu"), found.scale, found.seed)


def words_of(source: str | Path, tokens: int) -> tuple[str, ...]:
    """The token strings of the inputs; their positions if the file has none."""
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
            f"inputs {subject.name} have {q.shape[-2]} queries for {has} keys; the numbers must be equal."
        )
    if tokens is not None and tokens > has:
        shipped_name = subject.name.startswith("encoder")
        more = " Concatenated documents have 2048: inputs stitched." if shipped_name else ""
        raise OptionError(
            f"{tokens} tokens are more than the {has} of {subject.name}, which cannot be extended.{more}"
        )
    place = {"dtype": getattr(torch, dtype), "device": device}
    return Activations(*(tensor[..., :tokens, :].to(**place) for tensor in (q, k, v)))


def _copies(activations: Activations, batch: int) -> Activations:
    return Activations(*(tensor.repeat(batch, 1, 1, 1) for tensor in activations))
