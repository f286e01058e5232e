"""Inputs of a measurement: named q, k and v, their exact output, and their transfer to another process."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

import torch
from safetensors.torch import save_file
from torch import Tensor

from efficient_attn.errors import DataError, OptionError
from efficient_attn.measure import error as measure
from efficient_attn.measure.inputs import (
    CAUSAL,
    SHIPPED,
    Activations,
    Captured,
    gaussian,
    read_activations,
    shipped,
)
from efficient_attn.problem import positive_count

WORDS = ("gaussian", *SHIPPED)

# Rows per head for a median of pairs; more rows do not change its second digit.
_MOST_ROWS = 256


@dataclass(frozen=True, eq=False)
class Subject:
    """Named inputs.

    Attributes:
        name: Name in records, such as `gaussian(norm=0.5)`.
        activations: q, k, v in the dtype of the computation.
        scale: Factor on q·k.
        seed: Random seed of Gaussian inputs, and of the first draw of random features.
        causal: Causal masking.
    """

    name: str
    activations: Activations
    scale: float
    seed: int = 0
    causal: bool = False

    @functools.cached_property
    def exact(self) -> Tensor:
        """Exact output in float64."""
        return measure.exact_output(*self.activations, scale=self.scale, causal=self.causal)

    @property
    def pair_norm(self) -> float:
        """Median of |x + y|² over up to 256 queries x = √scale·q and visible keys y = √scale·k."""
        step = max(self.tokens // _MOST_ROWS, 1)
        q, k = (tensor[..., ::step, :].double() for tensor in self.activations[:2])
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        squares = q.square().sum(-1)[..., :, None] + k.square().sum(-1)[..., None, :] + 2 * q @ k.mT
        if self.causal:
            squares = squares[..., torch.ones(squares.shape[-2:], dtype=torch.bool).tril()]
        return float(self.scale * squares.median())

    @property
    def tokens(self) -> int:
        return self.activations.k.shape[-2]

    @property
    def num_kv_heads(self) -> int | None:
        """Number of heads of the keys and values; None: as many as of the queries."""
        heads, kv_heads = (tensor.shape[1] for tensor in self.activations[:2])
        return None if kv_heads == heads else kv_heads

    @property
    def head_dim(self) -> int:
        return self.activations.q.shape[-1]

    def placed(
        self, *, dtype: str, device: str, tokens: int | None = None, batch: int = 1, causal: bool = False
    ) -> "Subject":
        """Copies of the first tokens in a dtype on a device; inputs are never extended.

        Args:
            causal: Whether inputs that are not causal in their model are measured causally too.
        """
        if tokens is not None and tokens > self.tokens:
            raise OptionError(
                f"{tokens} tokens are more than the {self.tokens} of {self.name}, which cannot be extended."
            )
        tensors = (
            tensor[..., :tokens, :].to(dtype=getattr(torch, dtype), device=device).repeat(batch, 1, 1, 1)
            for tensor in self.activations
        )
        return replace(self, activations=Activations(*tensors), causal=causal or self.causal)


def subjects(
    inputs: Sequence[str | Path | Captured],
    *,
    norms: Sequence[float] = (1.0,),
    tokens: int = 1,
    num_heads: int = 1,
    head_dim: int = 1,
    layers: Sequence[int] | None = None,
    seq_len: int | None = None,
    seed: int = 0,
    data_seeds: int = 1,
    causal: bool = False,
) -> tuple[Subject, ...]:
    """One subject per norm and seed of Gaussian inputs, and per layer of model inputs; in float32.

    Args:
        norms, tokens, num_heads, head_dim, data_seeds: Of Gaussian inputs alone.
        seq_len: Length to which the caller cuts the layers. Unless `layers` names them, shorter shipped
            layers are left out; None leaves out all but the longest.
        causal: Whether layers that are not causal in their model are measured causally too.
    """
    positive_count("data_seeds", data_seeds)
    if not inputs or not norms:
        raise OptionError(
            f"inputs and norms must not be empty; inputs are {', '.join(WORDS)} or a safetensors file."
        )
    draw = functools.partial(gaussian, tokens=tokens, num_heads=num_heads, head_dim=head_dim)
    found: list[Subject] = []
    for source in inputs:
        if source == "gaussian":
            found += [
                Subject(f"gaussian(norm={norm:g})", draw(norm=norm, seed=one), head_dim**-0.5, one)
                for norm in norms
                for one in range(seed, seed + data_seeds)
            ]
        else:
            found += _of_model(source, layers, seq_len, seed, causal)
    return tuple(found)


def _of_model(
    source: str | Path | Captured, layers: Sequence[int] | None, seq_len: int | None, seed: int, causal: bool
) -> Iterator[Subject]:
    """Layers that read all keys in the model, or all earlier ones, as in the measurement.

    Unless layers are named or all are measured causally, causal layers are left out beside others.
    """
    name = _name_of(source) if isinstance(source, Captured) else PurePath(source).name
    if isinstance(source, Captured):
        captured = source
    elif source in SHIPPED:
        captured = shipped(SHIPPED[str(source)])
    elif Path(source).is_file():
        captured = read_activations(source)
    else:
        raise DataError(
            f"inputs cannot be {str(source)!r}: there is no such file. Known: {', '.join(WORDS)}."
        )
    patterns = captured.patterns
    past = {layer for layer, text in patterns.items() if text == CAUSAL}
    full = [layer for layer in captured.layers if layer not in patterns or (causal and layer in past)]
    usual = full or [layer for layer in captured.layers if layer in past] or list(captured.layers)
    if not isinstance(source, Captured) and source in SHIPPED:
        usual = _long_enough(captured, usual, seq_len)
    chosen = dict.fromkeys(usual if layers is None else layers)
    for layer in chosen:
        if layer not in captured.layers:
            has = ", ".join(map(str, captured.layers))
            raise OptionError(f"layer {layer} is not in {name}; it has {has}.")
        if layer in patterns and layer not in past:
            raise DataError(
                f"Layer {layer} of {name} is {patterns[layer]} in its model; this measurement uses full "
                "attention, causal or bidirectional."
            )
        activations = Activations(*(tensor.float() for tensor in captured.layers[layer]))
        scale = activations.q.shape[-1] ** -0.5 if captured.scale is None else captured.scale
        yield Subject(f"{name}(layer={layer})", activations, scale, seed, causal or layer in past)


def _long_enough(captured: Captured, layers: Sequence[int], seq_len: int | None) -> list[int]:
    """The layers of at least `seq_len` tokens, or the longest."""
    tokens = {layer: captured.layers[layer].k.shape[-2] for layer in layers}
    longest = max(tokens.values())
    least = longest if seq_len is None else min(seq_len, longest)
    return [layer for layer in layers if tokens[layer] >= least]


def _name_of(captured: Captured) -> str:
    """Name of a model, with the hash of its text if it read one."""
    name, text = captured.about["model"], captured.about.get("text_sha256")
    return name if text is None else f"{name} on 1 text #{text[:8]}"


def write_given(path: str | Path, subject: Subject) -> None:
    """Write the first sequence's q, k, v in their dtype, in the format of `read_activations`."""
    named = zip(Activations._fields, subject.activations, strict=True)
    tensors = {name: tensor[:1].cpu().contiguous() for name, tensor in named}
    save_file(tensors, path, metadata={"scale": repr(subject.scale)})


# Cached: all backends of a comparison share the same inputs.
@functools.lru_cache(maxsize=1)
def read_given(path: str, dtype: str, device: str, batch: int = 1) -> Subject:
    """A batch of copies of the q, k, v that `write_given` wrote."""
    captured = read_activations(path)
    ((layer, activations),) = captured.layers.items()
    scale = activations.q.shape[-1] ** -0.5 if captured.scale is None else captured.scale
    return Subject(f"layer {layer}", activations, scale).placed(dtype=dtype, device=device, batch=batch)
