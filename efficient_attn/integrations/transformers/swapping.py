"""Backends in all supported layers of a model, its outputs, and its activations on a text."""

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.backend import Backend, calibrate
from efficient_attn.backends import spawn_seeds
from efficient_attn.errors import DataError, OptionError, UnsupportedError
from efficient_attn.integrations.capture import Capturing
from efficient_attn.integrations.transformers.assignment import EXACT, build_all
from efficient_attn.integrations.transformers.attachment import observed_sites
from efficient_attn.integrations.transformers.loading import Opened, positions, token_ids
from efficient_attn.integrations.transformers.sites import AttentionSite
from efficient_attn.measure.inputs import Captured
from efficient_attn.ops.dtypes import upcast
from efficient_attn.options import SEED
from efficient_attn.problem import positive_count
from efficient_attn.registry import Choice

# Rows of logits, each as wide as the vocabulary, that a backward pass holds at once.
_ROWS = 128


class ModelOutputs(NamedTuple):
    """Outputs of a model for one text.

    Attributes:
        hidden: Last hidden states, [tokens model_dim].
        logits: Logits of the next token at a slice of positions, [positions vocabulary]; None for models
            without a language-model head.
    """

    hidden: Tensor
    logits: Callable[[slice], Tensor] | None


class AttentionSites(NamedTuple):
    """Attention modules of a model: `swapped` get the backend, `others` stay exact."""

    swapped: tuple[AttentionSite, ...]
    others: tuple[AttentionSite, ...]

    @property
    def ordered(self) -> list[AttentionSite]:
        return [*self.swapped, *self.others]

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers that get the backend."""
        return tuple(sorted({site.layer for site in self.swapped}))

    @property
    def causal(self) -> bool:
        return self.swapped[0].pattern.causal


def sites_of(model: Any) -> AttentionSites:
    """Attention modules of an encoder or a decoder. Sliding ones are swapped if none is full."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError(
            f"{type(model).__name__} is an encoder-decoder; only encoders and decoders are measured. "
            "Use `swapped` to compare such a model yourself."
        )
    sites = observed_sites(model)
    for kind in ("full", "sliding"):
        chosen = tuple(site for site in sites if site.kind == kind)
        if chosen:
            return AttentionSites(chosen, tuple(site for site in sites if site.kind != kind))
    raise UnsupportedError(f"{type(model).__name__} has no self-attention.")


def build_layers(
    sites: AttentionSites, chosen: Mapping[int, tuple[Any, Mapping[str, Any]]], *, max_tokens: int, seed: int
) -> dict[str, Backend]:
    """Build the chosen backend of each layer of self-attention, and exact attention elsewhere.

    The seed of a layer does not depend on the choices for other layers. A seed among the options of a choice
    is added to `seed`: the layer then has the same random features as if all layers were built with this
    sum.
    """
    choices = {site.path: EXACT for site in sites.ordered}
    for place, site in enumerate(sites.ordered):
        if site.layer in chosen and site.kind != "cross":
            backend, options = chosen[site.layer]
            if SEED in options:
                seeds = spawn_seeds(seed + options[SEED], len(sites.ordered))
                options = {**options, SEED: seeds[place]}
            choices[site.path] = Choice(backend, options)
    return build_all(sites.ordered, choices, max_tokens, seed)


def run(model: Any, ids: Tensor, *, predicts: bool) -> ModelOutputs:
    """Hidden states and next-token logits of a text, ids [1 tokens]."""
    # Logits of all tokens need more memory than the model.
    body = model.get_decoder() if predicts else model.base_model
    with torch.no_grad():
        states = body(input_ids=ids, **_no_cache(model))
    logits = (lambda rows: _head(model, states, ids, rows)) if predicts else None
    return ModelOutputs(states.last_hidden_state[0], logits)


def _head(model: Any, states: Any, ids: Tensor, rows: slice) -> Tensor:
    """Logits of a slice of positions, by the model's own head on its last hidden states.

    They have gradients if the hidden states require them.
    """
    part, calls = replace(states, last_hidden_state=states.last_hidden_state[:, rows]), []
    gradients = part.last_hidden_state.requires_grad

    def body(*args: Any, **named: Any) -> Any:
        calls.append(args)
        return part

    with replaced_forward(model.get_decoder(), body), torch.set_grad_enabled(gradients):
        logits = model(input_ids=ids[:, rows], **_no_cache(model)).logits[0]
    if not calls:
        raise UnsupportedError(f"{type(model).__name__} computes its logits without calling its decoder.")
    return logits


@contextmanager
def replaced_forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Context with another forward of a module, even if accelerate has already replaced it."""
    former = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if former is not None:
            module.forward = former


def backpropagate_loss(model: Any, ids: Tensor) -> None:
    """Backpropagate the summed loss of the next tokens of a text, with logits in blocks of positions.

    Not the mean, whose gradients over many tokens underflow in half precision.
    """
    body = model.get_decoder()(input_ids=ids, **_no_cache(model))
    states = replace(body, last_hidden_state=body.last_hidden_state.detach().requires_grad_())
    for start in range(0, ids.shape[1] - 1, _ROWS):
        rows = slice(start, min(start + _ROWS, ids.shape[1] - 1))
        logits = upcast(_head(model, states, ids, rows))
        F.cross_entropy(logits, ids[0, rows.start + 1 : rows.stop + 1], reduction="sum").backward()
    body.last_hidden_state.backward(states.last_hidden_state.grad)


def predicts_next(model: Any, sites: AttentionSites) -> bool:
    return sites.causal and model.get_output_embeddings() is not None


def forward(model: Any, ids: Tensor) -> Any:
    """The timed call: one forward pass on one text, with the logits of its last token."""
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with torch.no_grad():
        return model(input_ids=ids, **last, **_no_cache(model))


def _no_cache(model: Any) -> dict[str, bool]:
    """Arguments that turn the KV cache off."""
    return {"use_cache": False} if getattr(model.config, "use_cache", None) is not None else {}


def calibrate_on(model: Any, backends: Sequence[Backend], ids: Tensor) -> bool:
    """Calibrate backends on a text, and return whether any needed it."""
    if not any(backend.needs_calibration for backend in backends):
        return False
    calibrate(model, input_ids=ids, **_no_cache(model))
    return True


def capture_text(
    opened: Opened, text: str, *, layers: Sequence[int] | None = None, max_tokens: int = 512
) -> Captured:
    """Capture an encoder or decoder of transformers on a text, in its layers that read all tokens.

    The text is cut to the maximum sequence length of the model.

    Args:
        layers: Indices of the layers to keep; None keeps all.
    """
    positive_count("max_tokens", max_tokens)
    sites = {site.layer: site.path for site in sites_of(opened.model).swapped}
    chosen = sorted(sites if layers is None else set(layers))
    unknown = [layer for layer in chosen if layer not in sites]
    if unknown or not chosen:
        request = ", ".join(map(str, unknown)) or "none"
        numbers = ", ".join(map(str, sorted(sites)))
        raise OptionError(f"layers of this model that read all tokens: {numbers}; not {request}.")
    ids = token_ids(opened, text, most=min(max_tokens, positions(opened) or max_tokens))
    if ids.numel() == 0:
        raise DataError("The text holds no tokens.")
    names = {layer: sites[layer] for layer in chosen}
    with torch.inference_mode(), Capturing(opened.model, set(names.values()).__contains__) as capturing:
        opened.model(input_ids=ids)
    captured = capturing.captured(names)
    # A model from memory has no hash of its weights.
    fields = ("model", "weights_sha256", "transformers")
    about = {name: opened.about[name] for name in fields if name in opened.about}
    about |= {"text_sha256": hashlib.sha256(text.encode()).hexdigest()}
    tokens = tuple(opened.tokenizer.convert_ids_to_tokens(ids[0].tolist()))
    return replace(captured, tokens=tokens, about={**captured.about, **about})
