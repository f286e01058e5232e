"""Sources of q, k and v: Gaussian draws, the shipped activations, or a file of captured activations."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from efficient_attn.errors import DataError, OptionError
from efficient_attn.options import whole_number
from efficient_attn.problem import positive_count
from efficient_attn.shapes import Keys, Queries, Values
from efficient_attn.tensor_headers import load_tensors, read_header

# Texts of the shipped activations: four of an encoder, the last one of a decoder.
TEXTS = ("alice", "pride", "sawyer", "opticks", "types")

# Files of a text in more than one: layers of the whole text, then layers of its beginning.
_FILES = {"types": ("types", "types-18")}

# Names of the shipped inputs, each with its text.
SHIPPED = {"encoder": 0, "decoder": 4}

# Names of tensors, `layer.N.q` or `q`.
_NAME = re.compile(r"(?:layer\.(\d{1,9})\.)?([qkv])")

# Entries of the metadata that describe the activations, each as JSON.
_METADATA: dict[str, Any] = {
    "tokens": tuple[str, ...],
    "scale": Annotated[float, Meta(gt=0)],
    "patterns": dict[Annotated[int, Meta(ge=0)], str],
}

# Pattern of a causal layer without a window.
CAUSAL = "causal over all keys"

# Stream of the seed for inputs; backends use the plain seed, and equal streams would give equal vectors.
_INPUT_STREAM = 1


class Activations(NamedTuple):
    """Inputs of attention in one layer: softmax(scale · q·k) v."""

    q: Queries
    k: Keys
    v: Values


@dataclass(frozen=True, kw_only=True)
class Captured:
    """Contents of a file of captured activations.

    Attributes:
        layers: Activations by layer, in the dtype of the file, with batch size one.
        tokens: Token strings of the longest layer; empty if the file has none.
        scale: Factor on q·k in the model; None: 1/√head_dim.
        patterns: Visible keys of the layers that do not read all keys.
        about: Other provenance in the metadata.
    """

    layers: Mapping[int, Activations]
    tokens: tuple[str, ...] = ()
    scale: float | None = None
    patterns: Mapping[int, str] = field(default_factory=dict)
    about: Mapping[str, str]


def gaussian(
    *,
    norm: float,
    tokens: int,
    head_dim: int,
    num_heads: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Activations:
    """q, k ~ N(0, norm² I) and v ~ N(0, I), before scaling; drawn in float64 on the CPU."""
    for name, value in (("tokens", tokens), ("head_dim", head_dim), ("num_heads", num_heads)):
        positive_count(name, value)
    if not norm > 0 or norm == float("inf"):
        raise OptionError(f"norm is a finite number above 0, not {norm!r}.")
    whole_number("seed", seed)
    stream = np.random.SeedSequence((seed, _INPUT_STREAM)).generate_state(1)
    generator = torch.Generator().manual_seed(int(stream[0]))
    shape = (3, 1, num_heads, tokens, head_dim)
    q, k, v = torch.randn(shape, generator=generator, dtype=torch.float64)
    return Activations((norm * q).to(dtype), (norm * k).to(dtype), v.to(dtype))


def sample(layer: int = 1, text: int = 0, *, dtype: torch.dtype = torch.float32) -> Activations:
    """q, k, v of one layer of a model on one text.

    Texts 0 to 3 are of the encoder all-MiniLM-L6-v2, [1, 12, 512, 32] each: layers 0, 1 and 5 of text 0,
    layer 1 of the others. Text 4 is of the causal decoder SmolLM2-135M: layer 19, q [1, 9, 4096, 64], k and v
    [1, 3, 4096, 64], and layer 18 on the first 2048 tokens. See PROVENANCE.md in the data folder.
    """
    layers = shipped(text).layers
    if layer not in layers:
        has = ", ".join(map(str, layers))
        raise OptionError(
            f"layer {layer!r} of text {text} is not shipped. Shipped layers of this text: {has}."
        )
    return Activations(*(tensor.to(dtype) for tensor in layers[layer]))


def shipped(text: int = 0) -> Captured:
    """The shipped layers of one text, with token strings and provenance."""
    if isinstance(text, bool) or text not in range(len(TEXTS)):
        names = ", ".join(f"{number} ({name})" for number, name in enumerate(TEXTS))
        raise OptionError(f"text is one of {names}, not {text!r}.")
    name = TEXTS[text]
    whole, *parts = (_read_shipped(file) for file in _FILES.get(name, (name,)))
    layers, patterns = dict(whole.layers), dict(whole.patterns)
    for part in parts:
        layers |= part.layers
        patterns |= part.patterns
    return replace(whole, layers=dict(sorted(layers.items())), patterns=patterns)


def _read_shipped(name: str) -> Captured:
    with resources.as_file(resources.files("efficient_attn.data") / f"{name}.safetensors") as path:
        return read_activations(path)


def read_activations(path: str | Path) -> Captured:
    """Read the activations of a safetensors file: `layer.N.q`, `.k`, `.v` per layer, or `q`, `k`, `v`.

    Tensors are [heads, tokens, head_dim], optionally with a leading batch axis of 1.

    Raises:
        DataError: If the file cannot be read, is not a safetensors file, or lacks matching finite q, k, v.
    """
    path = Path(path)
    described, about = read_header(path, hint=". Make one with: efficient-attn capture")
    names = _by_layer(described, path)
    for group in names.values():
        _check_shapes({letter: described[name] for letter, name in group.items()}, path)
    tensors = load_tensors(path, (name for group in names.values() for name in group.values()))
    layers = {layer: _activations(names[layer], tensors, path) for layer in sorted(names)}
    known: dict[str, Any] = {}
    for name in _METADATA.keys() & about.keys():
        try:
            known[name] = msgspec.json.decode(about[name], type=_METADATA[name])
        except (msgspec.DecodeError, RecursionError) as error:
            raise DataError(f"{path}: {name} in the metadata cannot be read: {error}.") from None
    rest = {name: text for name, text in about.items() if name not in _METADATA}
    return Captured(layers=layers, about=rest, **known)


def _by_layer(tensors: Mapping[str, Tensor], path: Path) -> dict[int, dict[str, str]]:
    """{layer: {"q": name, "k": …, "v": …}}; tensors without a layer in their name belong to layer 0."""
    groups: dict[int, dict[str, str]] = {}
    for name in tensors:
        if found := _NAME.fullmatch(name):
            groups.setdefault(int(found[1] or 0), {})[found[2]] = name
    incomplete = [layer for layer, group in groups.items() if len(group) < len(Activations._fields)]
    if not groups or incomplete:
        names = ", ".join(sorted(tensors)[:6]) or "nothing"
        raise DataError(
            f"{path} lacks q, k and v of one layer (layer.N.q, layer.N.k, layer.N.v); it holds {names}."
        )
    return groups


def _check_shapes(group: Mapping[str, Tensor], path: Path) -> None:
    """Refuse q, k and v with inconsistent shapes, before any data are read."""
    shapes = ", ".join(f"{name} {list(group[name].shape)}" for name in Activations._fields)
    q, k, v = (_as_batch(group[name]) for name in Activations._fields)
    if any(tensor.ndim != 4 or tensor.shape[0] != 1 or tensor.numel() == 0 for tensor in (q, k, v)):
        raise DataError(f"{path} does not hold q, k, v as [heads, tokens, head_dim] or [1, …]: {shapes}.")
    heads_fit = k.shape[1] == v.shape[1] and q.shape[1] % k.shape[1] == 0
    if not heads_fit or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise DataError(f"{path} holds q, k, v with inconsistent shapes: {shapes}.")
    for name, tensor in group.items():
        if not tensor.is_floating_point():
            raise DataError(f"{path} holds {name} as {tensor.dtype}, which is not a floating-point dtype.")


def _activations(names: Mapping[str, str], tensors: Mapping[str, Tensor], path: Path) -> Activations:
    for letter, name in names.items():
        if not tensors[name].isfinite().all():
            raise DataError(f"{path} holds {letter} with non-finite entries.")
    return Activations(*(_as_batch(tensors[names[letter]]) for letter in Activations._fields))


def _as_batch(tensor: Tensor) -> Tensor:
    return tensor[None] if tensor.ndim == 3 else tensor
