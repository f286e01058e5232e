"""Inputs of error measurements, by name."""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

import torch

from efficient_attn.errors import DataError, OptionError
from efficient_attn.measure.inputs import Activations, Captured, gaussian, read_activations, shipped, stitched
from efficient_attn.problem import positive_count
from efficient_attn.runner.subject import Subject

WORDS = ("gaussian", "encoder", "stitched")

# The only layer that all four texts of the shipped sample share.
_STITCHED_LAYERS = (1,)


def subjects(
    inputs: Sequence[str | Path],
    *,
    norms: Sequence[float],
    tokens: int,
    head_dim: int,
    layers: Sequence[int] | None,
    seed: int,
    data_seeds: int = 1,
) -> tuple[Subject, ...]:
    """One subject per norm and seed of Gaussian inputs, and per layer of model inputs; in float32.

    Raises:
        OptionError, DataError: If the inputs do not exist.
    """
    positive_count("data_seeds", data_seeds)
    if not inputs or not norms:
        raise OptionError(
            f"inputs and norms must not be empty; inputs are {', '.join(WORDS)} or a safetensors file."
        )
    found: list[Subject] = []
    for source in inputs:
        if source == "gaussian":
            found += [
                _gaussian(norm, tokens=tokens, head_dim=head_dim, seed=one)
                for norm in norms
                for one in range(seed, seed + data_seeds)
            ]
        elif source == "encoder":
            found += _layers("encoder", shipped(), layers)
        elif source == "stitched":
            chosen = _chosen("stitched", dict.fromkeys(_STITCHED_LAYERS), layers)
            scale = shipped().scale
            found += [_subject(f"stitched(layer={layer})", stitched(layer), scale) for layer in chosen]
        else:
            found += _layers(PurePath(source).name, _read(source), layers)
    return tuple(found)


def placed(subject: Subject, *, dtype: str, device: str) -> Subject:
    """The subject with q, k and v in a dtype on a device."""
    tensors = (tensor.to(dtype=getattr(torch, dtype), device=device) for tensor in subject.activations)
    return Subject(subject.name, Activations(*tensors), subject.scale, subject.seed)


def _gaussian(norm: float, *, tokens: int, head_dim: int, seed: int) -> Subject:
    drawn = gaussian(norm=norm, tokens=tokens, head_dim=head_dim, seed=seed)
    return _subject(f"gaussian(norm={norm:g})", drawn, None, seed=seed)


def _read(path: str | Path) -> Captured:
    if not Path(path).is_file():
        raise DataError(f"inputs cannot be {str(path)!r}: there is no such file. Known: {', '.join(WORDS)}.")
    return read_activations(path)


def _layers(name: str, captured: Captured, layers: Sequence[int] | None) -> list[Subject]:
    return [
        _subject(f"{name}(layer={layer})", captured.layers[layer], captured.scale)
        for layer in _chosen(name, _reading_all(name, captured, layers), layers)
    ]


def _reading_all(name: str, captured: Captured, layers: Sequence[int] | None) -> Mapping[int, Activations]:
    """Layers with full bidirectional attention in the model, as in this measurement."""
    kept = {layer: x for layer, x in captured.layers.items() if layer not in captured.patterns}
    lost = [layer for layer in captured.patterns if layers is None or layer in layers]
    if lost and (layers is not None or not kept):
        raise DataError(
            f"Layer {lost[0]} of {name} is {captured.patterns[lost[0]]} in its model; this measurement uses "
            "full bidirectional attention."
        )
    return kept if lost else captured.layers


def _chosen(name: str, has: Mapping[int, object], layers: Sequence[int] | None) -> Sequence[int]:
    missing = [layer for layer in layers or () if layer not in has]
    if missing:
        raise OptionError(f"layer {missing[0]} is not in {name}; it has {', '.join(map(str, has))}.")
    return tuple(has) if layers is None else tuple(dict.fromkeys(layers))


def _subject(name: str, activations: Activations, scale: float | None, *, seed: int = 0) -> Subject:
    q, k, v = (tensor.float() for tensor in activations)
    return Subject(name, Activations(q, k, v), q.shape[-1] ** -0.5 if scale is None else scale, seed)
