"""The transformers model inside an object of another library, such as PEFT or Sentence Transformers."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from efficient_attn.errors import DtypeError, UnsupportedError


def unwrap(model: Any) -> PreTrainedModel:
    """The outermost transformers model of a module.

    Raises:
        DtypeError: If there is none.
        UnsupportedError: If there are several side by side.
    """
    found = _outermost(model) if isinstance(model, nn.Module) else []
    if not found:
        raise DtypeError(f"model is a transformers model, or holds one, not {type(model).__name__}.")
    if len(found) > 1:
        kinds = " and ".join(type(one).__name__ for one in found[:2])
        raise UnsupportedError(
            f"{type(model).__name__} holds {len(found)} transformers models, {kinds}; attach to one of them."
        )
    return found[0]


def _outermost(module: nn.Module) -> list[PreTrainedModel]:
    if isinstance(module, PreTrainedModel):
        return [module]
    found = [one for child in module.children() for one in _outermost(child)]
    return list({id(one): one for one in found}.values())
