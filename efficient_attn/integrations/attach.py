"""Backends in models of transformers and in any code that calls torch's attention."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from efficient_attn.errors import OptionError


def attach(
    model: nn.Module,
    backend: Any = None,
    *,
    example: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
    **arguments: Any,
) -> Any:
    """Replace the attention of a model by backends, in place. The model decides how:

    - A transformers model, or a module that holds one: `efficient_attn.integrations.transformers.attach`,
      with backends by layer or by kind (`full`, `sliding`, `cross`). Returns the model, which
      `save_pretrained` saves with its backends.
    - Any other model: `efficient_attn.intercept.replace`, at each call of `F.scaled_dot_product_attention` in
      an example, also those of `nn.MultiheadAttention`. `undo()` of the result restores the model.

    Args:
        backend: Any argument of `build`, a mapping from layers or call sites to backends, or the file of a
            plan.
        example: Call of a model outside of transformers on typical input, `lambda: model(x)`,
            or a list of such calls.
        arguments: Further arguments of these functions: `seed`, `max_tokens`, `weights`, backend options, …

    Raises:
        OptionError: If the model is not of transformers and has no example.
        UnsupportedError: If a backend does not support a layer.
    """
    # A model of transformers has imported it.
    hf = sys.modules.get("transformers.modeling_utils")
    if hf is not None and any(isinstance(part, hf.PreTrainedModel) for part in model.modules()):
        from efficient_attn.integrations.transformers import attach as attach_transformers

        return attach_transformers(model, backend, **arguments)
    if example is None:
        raise OptionError(
            f"{type(model).__name__} is no transformers model: give example=lambda: model(x), which shows "
            "its calls of F.scaled_dot_product_attention."
        )
    from efficient_attn.integrations.intercept import replace

    return replace(model, backend, example=example, **arguments)
