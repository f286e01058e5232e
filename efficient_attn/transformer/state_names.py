"""Names of submodules in state dicts of torch's own layers."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn


def accept_names(module: nn.Module, names: Mapping[str, str]) -> None:
    """Load state dicts whose children of this module are called otherwise.

    Args:
        names: {name in the state dict: name here, which may be a path}.
    """
    # A function of this module, unlike a closure, survives pickling of the model.
    module.register_load_state_dict_pre_hook(partial(_rename, names))


def _rename(
    names: Mapping[str, str], module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Replace names directly after the prefix, in place."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        child, dot, name = key.removeprefix(prefix).partition(".")
        if child in names:
            state_dict[f"{prefix}{names[child]}{dot}{name}"] = state_dict.pop(key)
