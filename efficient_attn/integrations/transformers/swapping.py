"""One backend in the layers of a model that it can serve, and what the model then gives.

Only layers that read everything are given to a backend. Those that slide stay exact, unless the model has no
others, and so does attention to another sequence.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from efficient_attn.backend import Backend
from efficient_attn.errors import UnsupportedError
from efficient_attn.integrations.transformers.choosing import EXACT, Choice, build_all
from efficient_attn.integrations.transformers.places import Place, find_places
from efficient_attn.registry import BackendSpec, Capabilities, NoOptions
from efficient_attn.sweep.sizes import MEAN_OF_VALUES


class Outputs(NamedTuple):
    """What a model gives for one text.

    Attributes:
        hidden: After each layer, [tokens model_dim].
        logits: Of the next token, [tokens vocabulary]; None where the model predicts none.
    """

    hidden: tuple[Tensor, ...]
    logits: Tensor | None


class Places(NamedTuple):
    """Where a model attends.

    Attributes:
        swapped: Where backends are put.
        others: What stays exact.
    """

    swapped: tuple[Place, ...]
    others: tuple[Place, ...]

    @property
    def every(self) -> list[Place]:
        """In the order of the model."""
        return [*self.swapped, *self.others]

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers that are swapped."""
        return tuple(sorted({place.layer for place in self.swapped}))

    @property
    def causal(self) -> bool:
        return self.swapped[0].pattern.causal


def places_of(model: Any) -> Places:
    """The places of a model that is an encoder or a decoder.

    Raises:
        UnsupportedError: If it is both, or one that backends cannot be put into.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError(
            f"{type(model).__name__} is an encoder with a decoder; encoders and decoders alone are measured. "
            "`swapped` serves your own comparison of such a model."
        )
    found = find_places(model)
    for kind in ("full", "sliding"):
        chosen = tuple(place for place in found if place.kind == kind)
        if chosen:
            return Places(chosen, tuple(place for place in found if place.kind != kind))
    raise UnsupportedError(f"{type(model).__name__} has no attention within one sequence.")


def build_for(
    places: Places,
    backend: Any,
    options: Mapping[str, Any],
    *,
    layer: int | None,
    max_tokens: int,
    seed: int,
) -> dict[str, Backend]:
    """A backend for every place: the chosen one where it is swapped, exact attention elsewhere.

    Args:
        layer: The only layer to swap; None: all that can be.
        seed: Gives each layer's random features a draw of their own, the same alone as among others.
    """
    chosen = Choice(backend, options)
    choices = {place.path: EXACT for place in places.every} | {
        place.path: chosen for place in places.swapped if layer in (None, place.layer)
    }
    return build_all(places.every, choices, max_tokens, seed)


def run(model: Any, ids: Tensor, *, predicts: bool) -> Outputs:
    """Hidden states and, where it predicts the next token, logits of one text, ids [1 tokens]."""
    with torch.no_grad():
        given = model(input_ids=ids, output_hidden_states=True, **_no_cache(model))
    # The first are the embeddings.
    hidden = tuple(state[0] for state in given.hidden_states[1:])
    return Outputs(hidden, given.logits[0] if predicts else None)


def predicts_next(model: Any, places: Places) -> bool:
    """Whether it has a head that gives the distribution of the next token."""
    return places.causal and model.get_output_embeddings() is not None


def forward(model: Any, ids: Tensor) -> Any:
    """What is timed: the model on one text, without the hidden states."""
    with torch.no_grad():
        return model(input_ids=ids, **_no_cache(model))


def _no_cache(model: Any) -> dict[str, bool]:
    """Keys and values are not kept: nothing is generated."""
    return {"use_cache": False} if getattr(model.config, "use_cache", None) is not None else {}


class _Mean(nn.Module):
    """Every query gets the mean of the values that it may read."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        if key_mask is not None:
            raise UnsupportedError(f"{MEAN_OF_VALUES} is for texts without padding.")
        v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        if not self.causal:
            return v.mean(dim=-2, keepdim=True).expand_as(v).contiguous()
        counts = torch.arange(1, v.shape[-2] + 1, device=v.device)[:, None]
        return (v.cumsum(dim=-2, dtype=torch.promote_types(v.dtype, torch.float32)) / counts).to(v.dtype)


MEAN = BackendSpec(
    name=MEAN_OF_VALUES,
    summary="The mean of the values that a query may read.",
    options_type=NoOptions,
    capabilities=Capabilities(causal=True, cross=False, key_mask=False, streaming=False),
    builder=lambda problem, options: _Mean(problem.causal),
)


def calibrate_on(model: Any, backends: Sequence[Backend], ids: Tensor) -> bool:
    """Calibrate the backends in a model on a text, if they need it; whether they did."""
    from efficient_attn.calibration import calibrate

    if not any(backend.needs_calibration for backend in backends):
        return False
    calibrate(model, input_ids=ids, **_no_cache(model))
    return True
