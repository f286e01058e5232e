"""Former names of submodules in state dicts, accepted for one release."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn


def accept_former_names(module: nn.Module, **names: str) -> None:
    """Load state dicts in which the children of a module, `new=old`, have their former names."""
    new_names = {old: new for new, old in names.items()}
    # A function of this module, unlike a closure, survives pickling of the model.
    module.register_load_state_dict_pre_hook(partial(_rename, new_names))


def _rename(
    new_names: Mapping[str, str], module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Replace former names directly after the prefix, in place."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        child, dot, name = key.removeprefix(prefix).partition(".")
        if child in new_names:
            state_dict[f"{prefix}{new_names[child]}{dot}{name}"] = state_dict.pop(key)
