"""q, k and v of the layers of a Hugging Face model, as they enter softmax(scale · q·k) v.

The model is read from a local folder, from safetensors only; nothing is fetched, and no code from the
folder is run. Its attention is replaced by exact attention with a hook that records the inputs.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

from efficient_attn.errors import DataError, OptionError, UnsupportedError
from efficient_attn.measure.inputs import Activations, Captured
from efficient_attn.problem import positive_count
from efficient_attn.runner.units import show_bytes

FORMAT = "efficient-attn activations 1"
DEFAULT_MAX_TOKENS = 512
# Files of long texts and large models grow quickly.
MOST_BYTES = 1 << 30
_HALF_BYTES = 2


def capture(
    model_folder: str | Path,
    text: str,
    *,
    layers: Sequence[int] | None = None,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    name: str | None = None,
    most_bytes: int = MOST_BYTES,
) -> Captured:
    """Record the activations of a local encoder or decoder on the first `max_tokens` tokens of a text.

    The text is cut to the maximum sequence length of the model. The visible keys of each layer are stored
    with its activations, unless all keys are visible.

    Args:
        layers: Indices of the layers to keep; None keeps all.
        name: Name of the model in the file; None takes the name of the folder.
        most_bytes: Upper limit on the file size; larger requests are refused before the model runs.

    Raises:
        MissingPackageError: If transformers is not installed.
        DataError: If the folder holds no readable model, or the text has no tokens.
        UnsupportedError: If no backend supports the model's attention.
    """
    from efficient_attn.integrations.transformers.attachment import installed
    from efficient_attn.integrations.transformers.loading import open_model, positions, token_ids
    from efficient_attn.integrations.transformers.patterns import FULL
    from efficient_attn.integrations.transformers.swapping import build_for, sites_of

    positive_count("max_tokens", max_tokens)
    opened = open_model(model_folder, name=name)
    sites = sites_of(opened.model)
    chosen = _choose(sites.every, layers)
    ids = token_ids(opened, text, most=min(max_tokens, positions(opened) or max_tokens))
    if ids.numel() == 0:
        raise DataError("The text holds no tokens.")
    _check_size(chosen, ids.shape[1], most_bytes)
    backends = build_for(sites, "exact", {}, layer=None, max_tokens=ids.shape[1], seed=0)
    kept: dict[int, Activations] = {}
    with installed(opened.model, sites.every, backends), ExitStack() as stack, torch.inference_mode():
        for site in chosen:
            hook = backends[site.path].register_forward_pre_hook(_keeper(kept, site.layer))
            stack.callback(hook.remove)
        opened.model(input_ids=ids)
    about = {key: opened.about[key] for key in ("model", "weights_sha256", "transformers")}
    return Captured(
        layers={layer: kept[layer] for layer in sorted(kept)},
        tokens=tuple(opened.tokenizer.convert_ids_to_tokens(ids[0].tolist())),
        scale=_one_scale({site.layer: backends[site.path].problem.factor for site in chosen}),
        patterns={site.layer: str(site.pattern) for site in chosen if site.pattern != FULL},
        about={
            "format": FORMAT,
            **about,
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "torch": torch.__version__,
        },
    )


def save(captured: Captured, path: str | Path) -> None:
    """Write the activations as float16 safetensors, with tokens and origin in the metadata."""
    tensors = {
        f"layer.{layer}.{name}": _half(tensor, f"layer.{layer}.{name}")
        for layer, activations in captured.layers.items()
        for name, tensor in zip(Activations._fields, activations, strict=True)
    }
    about = {**captured.about, "tokens": json.dumps(captured.tokens, ensure_ascii=False)}
    if captured.scale is not None:
        about["scale"] = json.dumps(captured.scale)
    if captured.patterns:
        about["patterns"] = json.dumps({str(layer): told for layer, told in captured.patterns.items()})
    try:
        Path(path).write_bytes(to_bytes(tensors, metadata=about))
    except OSError as error:
        raise DataError(f"Cannot write activations to {path}: {error.strerror}.") from None


def _keeper(kept: dict[int, Activations], layer: int) -> Callable[[Any, tuple[Tensor, ...]], None]:
    """A forward hook that stores the inputs of a backend."""

    def keep(backend: Any, tensors: tuple[Tensor, ...]) -> None:
        q, k, v = (tensor.clone() for tensor in tensors)
        kept[layer] = Activations(q, k, v)

    return keep


def _choose(sites: Sequence[Any], layers: Sequence[int] | None) -> list[Any]:
    """The attention modules of the layers."""
    known = {site.layer: site for site in sites}
    if len(known) < len(sites):
        raise UnsupportedError("Two attentions of this model share a layer number; capture cannot name them.")
    kept = sorted(known) if layers is None else sorted(set(layers))
    beyond = [layer for layer in kept if layer not in known]
    if beyond or not kept:
        asked = ", ".join(map(str, beyond)) or "none"
        raise OptionError(f"layers are from {min(known)} to {max(known)} in this model, not {asked}.")
    return [known[layer] for layer in kept]


def _check_size(sites: Sequence[Any], tokens: int, most_bytes: int) -> None:
    """Refuse files above the limit, with grouped heads counted as separate ones."""
    entries = sum(3 * (site.num_heads or 1) * site.head_dim for site in sites)
    needed = _HALF_BYTES * tokens * entries
    if needed > most_bytes:
        raise OptionError(
            f"{len(sites)} layers of {tokens} tokens take up to {show_bytes(needed)}, more than "
            f"{show_bytes(most_bytes)}; name fewer layers or tokens."
        )


def _one_scale(scales: dict[int, float]) -> float:
    """The scale that all layers share."""
    if len(set(scales.values())) > 1:
        raise UnsupportedError("The layers of this model have different scales; choose a single layer.")
    return next(iter(scales.values()))


def _half(tensor: Tensor, name: str) -> Tensor:
    half = tensor.squeeze(0).to(torch.float16).contiguous()
    if not half.isfinite().all():
        raise DataError(f"{name} has entries beyond the range of float16 and cannot be stored.")
    return half
