"""q, k and v of every layer of a Hugging Face encoder, as they enter softmax(scale · q·k) v.

The model is loaded from a folder, from safetensors alone, and its own attention is replaced by a function
that keeps what it is given. Nothing is fetched, and no code from the folder is run.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

from efficient_attn.errors import DataError, MissingPackageError, OptionError, UnsupportedError
from efficient_attn.measure.inputs import Activations, Captured
from efficient_attn.problem import positive_count

FORMAT = "efficient-attn activations 1"
_NAME = "efficient_attn.capture"
_READ_BYTES = 1 << 20


def capture(
    model_folder: str | Path,
    text: str,
    *,
    layers: Sequence[int] | None = None,
    max_tokens: int = 512,
    name: str | None = None,
) -> Captured:
    """The activations of a local encoder on the first `max_tokens` tokens of a text.

    Args:
        layers: Numbers of the layers to keep; None keeps all.
        name: What the file calls the model; None takes the name of the folder.

    Raises:
        MissingPackageError: If transformers is not installed.
        DataError: If the folder holds no model that can be read, or the text has no tokens.
        UnsupportedError: If the model is no bidirectional encoder.
    """
    positive_count("max_tokens", max_tokens)
    folder = Path(model_folder)
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise DataError(f"{folder} holds no model.safetensors; capture reads a local folder with that file.")
    calls: list[tuple[Activations, float | None]] = []
    model, tokenizer = _load(folder, calls)
    limit = min(max_tokens, getattr(model.config, "max_position_embeddings", max_tokens))
    ids = tokenizer(text, truncation=True, max_length=limit, return_tensors="pt")["input_ids"]
    if ids.numel() == 0:
        raise DataError("The text holds no tokens.")
    with torch.inference_mode():
        model(input_ids=ids)
    kept = _choose(calls, layers)
    return Captured(
        layers={layer: calls[layer][0] for layer in kept},
        tokens=tuple(tokenizer.convert_ids_to_tokens(ids[0])),
        scale=calls[kept[0]][1],
        about=_provenance(name or folder.resolve().name, weights, text),
    )


def save(captured: Captured, path: str | Path) -> None:
    """Write the activations as float16 safetensors, tokens and origin in the file's metadata."""
    tensors = {
        f"layer.{layer}.{name}": _half(tensor, f"layer.{layer}.{name}")
        for layer, activations in captured.layers.items()
        for name, tensor in zip(Activations._fields, activations, strict=True)
    }
    about = {**captured.about, "tokens": json.dumps(captured.tokens, ensure_ascii=False)}
    if captured.scale is not None:
        about["scale"] = json.dumps(captured.scale)
    try:
        Path(path).write_bytes(to_bytes(tensors, metadata=about))
    except OSError as error:
        raise DataError(f"Cannot write activations to {path}: {error.strerror}.") from None


def _load(folder: Path, calls: list[tuple[Activations, float | None]]) -> tuple[Any, Any]:
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, AutoTokenizer
    except ImportError:
        raise MissingPackageError('Capturing needs transformers: pip install "efficient-attn[hf]".') from None
    # An attention function without a mask function of the same name would silently be given no masks.
    AttentionInterface.register(_NAME, _recorder(calls))
    AttentionMaskInterface.register(_NAME, _key_mask)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model = AutoModel.from_pretrained(
            folder,
            attn_implementation=_NAME,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"Cannot load a model from {folder}: {' '.join(str(error).split())[:200]}") from None
    return model.eval(), tokenizer


def _recorder(calls: list[tuple[Activations, float | None]]) -> Callable[..., tuple[Tensor, None]]:
    """An attention function for transformers that keeps q, k, v and attends exactly."""

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        if getattr(module, "is_causal", False):
            raise UnsupportedError("capture reads bidirectional encoders; this model attends causally.")
        calls.append((Activations(*(tensor.clone() for tensor in (query, key, value))), scaling))
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, scale=scaling, enable_gqa=True
        )
        return output.transpose(1, 2).contiguous(), None

    return attend


def _key_mask(*, attention_mask: Tensor | None = None, **_: Any) -> None:
    """One text without padding: every token is real, and there is no mask to make."""
    if attention_mask is not None and not attention_mask.all():
        raise UnsupportedError("capture reads one text without padding.")


def _choose(
    calls: Sequence[tuple[Activations, float | None]], layers: Sequence[int] | None
) -> tuple[int, ...]:
    if not calls:
        raise UnsupportedError(
            "This model does not call transformers' attention interface; nothing was captured."
        )
    kept = tuple(range(len(calls))) if layers is None else tuple(sorted(set(layers)))
    beyond = [layer for layer in kept if not 0 <= layer < len(calls)]
    if beyond or not kept:
        asked = ", ".join(map(str, beyond)) or "none"
        raise OptionError(f"layers are from 0 to {len(calls) - 1} in this model, not {asked}.")
    return kept


def _provenance(name: str, weights: Path, text: str) -> dict[str, str]:
    import transformers

    digest = hashlib.sha256()
    with weights.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return {
        "format": FORMAT,
        "model": name,
        "weights_sha256": digest.hexdigest(),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }


def _half(tensor: Tensor, name: str) -> Tensor:
    half = tensor.squeeze(0).to(torch.float16).contiguous()
    if not half.isfinite().all():
        raise DataError(f"{name} has entries beyond float16 and cannot be stored.")
    return half
