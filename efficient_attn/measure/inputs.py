"""Sources of q, k and v: Gaussian draws, the shipped activations, or a file of captured activations."""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Meta
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from efficient_attn import data
from efficient_attn.errors import DataError, OptionError
from efficient_attn.limits import TENSOR_FILE_BYTES, check_header
from efficient_attn.measure import error as measure
from efficient_attn.options import whole_number
from efficient_attn.problem import positive_count
from efficient_attn.registry import ALL_DTYPES
from efficient_attn.shapes import Keys, Queries, Values
from efficient_attn.theory.floors import weight_spectra

# Texts of the shipped activations: four of an encoder, the last one of a decoder.
TEXTS = ("alice", "pride", "sawyer", "opticks", "types")

# Texts with several files: layers of the whole text, then layers of its beginning.
_FILES = {"types": ("types", "types-18")}

SHIPPED = {"encoder": 0, "decoder": 4}

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

WORDS = ("gaussian", *SHIPPED)


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

    def factor(self, layer: int) -> float:
        """Factor on q·k of a layer."""
        return self.layers[layer].q.shape[-1] ** -0.5 if self.scale is None else self.scale


def gaussian(
    *,
    norm: float,
    tokens: int,
    head_dim: int,
    num_heads: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Activations:
    """q, k ~ N(0, norm² I) and v ~ N(0, I), before scaling, drawn in float64 on the CPU."""
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
    folder, name = Path(data.__file__).parent, TEXTS[text]
    parts = [read_activations(folder / f"{file}.safetensors") for file in _FILES.get(name, (name,))]
    layers = {layer: tensors for part in parts for layer, tensors in part.layers.items()}
    patterns = {layer: pattern for part in parts for layer, pattern in part.patterns.items()}
    return replace(parts[0], layers=dict(sorted(layers.items())), patterns=patterns)


def read_activations(path: str | Path) -> Captured:
    """Read the activations of a safetensors file: `layer.N.q`, `.k`, `.v` per layer, or `q`, `k`, `v`.

    Tensors are [heads, tokens, head_dim], optionally with a leading batch axis of 1.

    Raises:
        DataError: If the file cannot be read, is not a safetensors file, or lacks matching finite q, k, v.
    """
    path = Path(path)
    hint = ". Make one with: efficient-attn swap MODEL --save"
    check_header(path, most=TENSOR_FILE_BYTES, hint=hint)
    groups: dict[int, dict[str, Tensor]] = {}
    try:
        # The library checks shapes and offsets against the size of the file, and maps it into memory.
        with safe_open(path, framework="pt") as file:
            about, names = file.metadata() or {}, sorted(file.keys())
            for name in names:
                # Tensors without a layer in their name belong to layer 0.
                if parts := _NAME.fullmatch(name):
                    groups.setdefault(int(parts[1] or 0), {})[parts[2]] = file.get_tensor(name)
    # PyTorch raises a RuntimeError if the file cannot be mapped.
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{path} is not a valid safetensors file: {reason}.") from None
    if not groups or any(len(group) < len(Activations._fields) for group in groups.values()):
        raise DataError(
            f"{path} lacks q, k and v of one layer (layer.N.q, layer.N.k, layer.N.v); it holds "
            f"{', '.join(names[:6]) or 'nothing'}."
        )
    layers = {layer: _activations(group, path) for layer, group in sorted(groups.items())}
    metadata: dict[str, Any] = {}
    for name in _METADATA.keys() & about.keys():
        try:
            metadata[name] = msgspec.json.decode(about.pop(name), type=_METADATA[name])
        except (msgspec.DecodeError, RecursionError) as error:
            raise DataError(f"{path}: {name} in the metadata cannot be read: {error}.") from None
    return Captured(layers=layers, about=about, **metadata)


def _activations(group: Mapping[str, Tensor], path: Path) -> Activations:
    shapes = ", ".join(f"{name} {list(group[name].shape)}" for name in Activations._fields)
    tensors = [group[name] for name in Activations._fields]
    q, k, v = tensors = [tensor[None] if tensor.ndim == 3 else tensor for tensor in tensors]
    fits = all(tensor.ndim == 4 and tensor.shape[0] == 1 and tensor.numel() for tensor in tensors)
    fits = fits and k.shape[1:3] == v.shape[1:3] and q.shape[-1] == k.shape[-1]
    if not fits or q.shape[1] % k.shape[1]:
        raise DataError(f"{path} does not hold matching q, k, v as [heads, tokens, head_dim]: {shapes}.")
    for name, tensor in group.items():
        if str(tensor.dtype).removeprefix("torch.") not in ALL_DTYPES:
            raise DataError(f"{path} holds {name} as {tensor.dtype}; dtypes are {', '.join(ALL_DTYPES)}.")
        if not tensor.isfinite().all():
            raise DataError(f"{path} holds {name} with non-finite entries.")
    return Activations(q, k, v)


@dataclass(frozen=True, eq=False)
class NamedInputs:
    """Named inputs.

    Attributes:
        name: Name in records, such as `gaussian(norm=0.5)`.
        seed: Random seed of Gaussian inputs, and of the first draw of random features.
        rows: Positions of the queries whose outputs are compared with exact ones, [rows]; None: all.
    """

    name: str
    activations: Activations
    scale: float
    seed: int = 0
    causal: bool = False
    rows: Tensor | None = None

    @functools.cached_property
    def exact(self) -> Tensor:
        """Exact output of the compared queries in float64."""
        return measure.exact_output(*self.activations, scale=self.scale, causal=self.causal, rows=self.rows)

    @functools.cached_property
    def uniform(self) -> Tensor:
        """Uniform attention of the compared queries in float64."""
        q, _, v = self.activations
        return self.compared(measure.mean_of_values(q, v.double(), causal=self.causal))

    @functools.cached_property
    def spectra(self) -> list[Tensor]:
        """Singular values of the exact weights, by block."""
        return weight_spectra(self.with_unit_values(self.tokens).exact, causal=self.causal)

    def with_unit_values(self, tokens: int) -> "NamedInputs":
        """The first tokens in float64 with unit vectors as values: outputs are attention weights."""
        q, k, _ = (x[..., :tokens, :].cpu().double() for x in self.activations)
        unit = torch.eye(k.shape[-2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
        return replace(self, activations=Activations(q, k, unit))

    def compared(self, output: Tensor) -> Tensor:
        """The compared queries of an output [batch heads tokens value_dim]."""
        return output if self.rows is None else output[..., self.rows, :]

    @property
    def tokens(self) -> int:
        return self.activations.k.shape[-2]

    @property
    def shape(self) -> dict[str, Any]:
        """Fields of a case: heads, their dimension and causality."""
        heads, kv_heads = (tensor.shape[1] for tensor in self.activations[:2])
        return {
            "num_heads": heads,
            "num_kv_heads": None if kv_heads == heads else kv_heads,
            "head_dim": self.activations.q.shape[-1],
            "causal": self.causal,
        }


def subjects(
    inputs: Sequence[str | Path | Captured],
    *,
    norms: Sequence[float] = (1.0,),
    tokens: int = 1,
    head_dim: int = 1,
    layers: Sequence[int] | None = None,
    shorter: bool = False,
    seed: int = 0,
    causal: bool = False,
) -> tuple[NamedInputs, ...]:
    """One float32 subject per norm of Gaussian inputs and per layer of model inputs.

    Args:
        norms, tokens, head_dim: For Gaussian inputs only.
        shorter: Whether to include shipped layers shorter than the longest if `layers` is empty.
        causal: Whether layers that are not causal in their model are measured causally too.
    """
    if not inputs or not norms:
        raise OptionError(
            f"inputs and norms must not be empty; inputs are {', '.join(WORDS)} or a safetensors file."
        )
    chosen: list[NamedInputs] = []
    for source in inputs:
        if source != "gaussian":
            chosen += _of_model(source, layers, shorter, seed, causal)
            continue
        for norm in norms:
            drawn = gaussian(norm=norm, tokens=tokens, head_dim=head_dim, seed=seed)
            chosen.append(NamedInputs(f"gaussian(norm={norm:g})", drawn, head_dim**-0.5, seed))
    return tuple(chosen)


def _of_model(
    source: str | Path | Captured, layers: Sequence[int] | None, shorter: bool, seed: int, causal: bool
) -> Iterator[NamedInputs]:
    """Layers that read all keys in the model, or all earlier ones, as in the measurement.

    Causal layers are left out if other layers exist, unless layers are named or all are measured causally.
    """
    if isinstance(source, Captured):
        captured, name, text = source, source.about["model"], source.about.get("text_sha256")
        name = name if text is None else f"{name} on 1 text #{text[:8]}"
    elif source in SHIPPED:
        captured, name = shipped(SHIPPED[str(source)]), str(source)
    elif Path(source).is_file():
        captured, name = read_activations(source), PurePath(source).name
    else:
        raise DataError(
            f"inputs cannot be {str(source)!r}: there is no such file. Known: {', '.join(WORDS)}."
        )
    past = {layer for layer, pattern in captured.patterns.items() if pattern == CAUSAL}
    full = [x for x in captured.layers if x not in captured.patterns or (causal and x in past)]
    usual = full or sorted(past) or list(captured.layers)
    if name in SHIPPED and not shorter:
        tokens = {layer: captured.layers[layer].k.shape[-2] for layer in usual}
        usual = [layer for layer in usual if tokens[layer] == max(tokens.values())]
    for layer in dict.fromkeys(usual if layers is None else layers):
        if layer not in captured.layers:
            has = ", ".join(map(str, captured.layers))
            raise OptionError(f"layer {layer} is not in {name}; it has {has}.")
        if layer in captured.patterns and layer not in past:
            raise DataError(
                f"Layer {layer} of {name} is {captured.patterns[layer]} in its model; this measurement uses "
                "full attention, causal or bidirectional."
            )
        activations = Activations(*(tensor.float() for tensor in captured.layers[layer]))
        yield NamedInputs(
            f"{name}(layer={layer})", activations, captured.factor(layer), seed, causal or layer in past
        )


def write_given(path: str | Path, subject: NamedInputs) -> None:
    """Write the first sequence's q, k, v in their dtype, in the format of `read_activations`."""
    named = zip(Activations._fields, subject.activations, strict=True)
    tensors = {name: tensor[:1].cpu().contiguous() for name, tensor in named}
    save_file(tensors, path, metadata={"scale": repr(subject.scale)})
