"""Plans in the configurations of saved models and in files, built for the attention modules of a model."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from efficient_attn.backend import Backend
from efficient_attn.errors import AttentionError, DataError
from efficient_attn.integrations.plan_files import check_size, plan_of_backends
from efficient_attn.integrations.transformers.assignment import Choice, build_all
from efficient_attn.integrations.transformers.attention_sites import AttentionSite
from efficient_attn.integrations.transformers.loading import data_errors
from efficient_attn.problem import AttentionProblem

# Saved tensors of the backend of each attention module, by their names in the backend.
Kept = dict[str, dict[str, Tensor]]


def build_plan(
    model: PreTrainedModel,
    sites: Sequence[AttentionSite],
    layers: Mapping[str, Mapping[str, Any]],
    place: str,
    kept: Kept | None = None,
) -> dict[str, Backend]:
    """Build the planned backend of every attention module.

    Args:
        place: Origin of the plan, for messages.
        kept: Saved tensors, whose numbers the backends must not exceed; None: as many as the model has.
    """
    named = {name_in_plan(model, site.path): site for site in sites}
    if named.keys() != layers.keys():
        raise DataError(f"{place}: the layers in efficient_attn belong to another model.")
    backends: dict[str, Backend] = {}
    for name, site in named.items():
        layer = layers[name]
        choice = {site.path: Choice(layer["backend"], layer["options"])}
        saved = None if kept is None else sum(tensor.numel() for tensor in kept[site.path].values())
        try:
            with data_errors(f"backend {layer['backend']!r} cannot be built"):
                check_size(layer, _problem(site, layer), model.num_parameters(), saved=saved)
                backends |= build_all([site], choice, layer["max_tokens"], None)
        except AttentionError as error:
            raise DataError(f"{place}, {site.path}: {error}") from None
    return backends


def _problem(site: AttentionSite, layer: Mapping[str, Any]) -> AttentionProblem:
    return AttentionProblem(
        head_dim=site.head_dim,
        num_heads=site.num_heads,
        max_tokens=layer["max_tokens"] or site.max_tokens,
        causal=site.pattern.causal,
    )


def plan_of(model: PreTrainedModel, backends: Mapping[str, Backend]) -> dict[str, Any] | None:
    """Plan of the attached backends for the configuration; None if a backend has no registered name."""
    return plan_of_backends({name_in_plan(model, path): own for path, own in backends.items()})


def name_in_plan(model: PreTrainedModel, path: str) -> str:
    """The path relative to the base model, so that a plan fits a model with and without its head."""
    return path.removeprefix(f"{model.base_model_prefix}.")
