"""Activations of a model of the user's own, or of a Hugging Face folder."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from efficient_attn.contained import running
from efficient_attn.errors import OptionError
from efficient_attn.integrations.called import called_model, is_called, refuse_beside
from efficient_attn.integrations.capture import DEFAULT_MAX_TOKENS
from efficient_attn.integrations.capture import capture as capture_folder
from efficient_attn.integrations.intercept import capture
from efficient_attn.measure.inputs import Captured


def captured_model(
    model: Any,
    *,
    text: str | None = None,
    layers: Sequence[int] | None = None,
    max_tokens: int | None = None,
    name: str | None = None,
) -> Captured:
    """q, k and v of a model of the user's own, or of a Hugging Face folder on a text.

    Raises:
        OptionError: If a folder has no text, or a text or length accompanies a model with its own inputs.
        DataError: If no attention can be captured.
    """
    if is_called(model):
        refuse_beside(model, text=text, max_tokens=max_tokens)
        called = called_model(model, name=name)
        with running(called.name), capture(called.module) as found:
            called.seeded()
        captured = found.captured(layers)
        return replace(captured, about={**captured.about, "model": called.name})
    if text is None:
        raise OptionError(f"text (--text FILE) is needed with the folder {str(model)!r}.")
    most = DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
    return capture_folder(model, text, layers=layers, max_tokens=most, name=name)


def site_notes(sites: Mapping[int, str], left: Mapping[str, str]) -> list[str]:
    """The call site of each layer number, and the sites without a number with their reasons."""
    named = ", ".join(f"{number} is {site}" for number, site in sites.items())
    others = [f"Left out: {site}: {why.rstrip('.')}." for site, why in left.items()]
    return [f"Layers are call sites: {named}.", *others]


def notes_of(captured: Captured) -> list[str]:
    """`site_notes` of activations, if they are of call sites."""
    sites = json.loads(captured.about.get("sites", "[]"))
    left = json.loads(captured.about.get("left_out", "{}"))
    return site_notes({layer: sites[layer] for layer in captured.layers}, left) if sites else []
