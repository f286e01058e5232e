"""Calibration of all the backends in a model, by running it."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from efficient_attn.backend import Backend


def calibrate(model: nn.Module, *inputs: Any, **named: Any) -> None:
    """Calibrate every backend of a model on the q, k and v that reach it in model(*inputs, **named).

    Each backend is calibrated before its first output, so later layers see the calibrated outputs of earlier
    layers. Use representative inputs; nothing else in the model changes, and nothing is recalibrated later.
    A model without such backends stays unchanged.
    """
    backends = [m for m in model.modules() if isinstance(m, Backend) and hasattr(m.core, "calibrate")]
    if not backends:
        return
    with ExitStack() as stack, torch.no_grad():
        for backend in backends:
            stack.enter_context(backend.register_forward_pre_hook(_calibrate, with_kwargs=True))
        model(*inputs, **named)


def _calibrate(backend: nn.Module, tensors: tuple[Any, ...], named: dict[str, Any]) -> None:
    assert isinstance(backend, Backend)
    inputs = dict(zip("qkv", tensors, strict=False)) | named
    if not {"q", "k", "v"} <= inputs.keys():
        return  # The call that follows names the missing argument.
    backend.calibrate(inputs["q"], inputs["k"], inputs["v"], key_mask=inputs.get("key_mask"))
