"""Checks of a backend's outputs and gradients: shape, dtype, device and finiteness."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from efficient_attn.backend import Backend


class WrongOutputError(Exception):
    """Raised if a backend returns anything other than a valid output; describes the returned value."""


@contextmanager
def outputs_checked(*modules: nn.Module) -> Iterator[None]:
    """Check all outputs of the backends in the modules, or of modules that are backends, within the block."""
    hooks = [one.register_forward_hook(_check_call, with_kwargs=True) for one in backends_in(*modules)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def backends_in(*modules: nn.Module) -> list[Backend]:
    """All distinct backends in the modules."""
    found = (part for module in modules for part in module.modules() if isinstance(part, Backend))
    return list(dict.fromkeys(found))


def check_gradients(gradients: Mapping[str, Tensor | None], *, optional: Sequence[str] = ()) -> None:
    """Refuse missing or non-finite gradients.

    Args:
        optional: Names of gradients that may be missing.
    """
    missing = [name for name, gradient in gradients.items() if gradient is None and name not in optional]
    if missing:
        raise WrongOutputError(f"no gradient reached {', '.join(missing)}.")
    for name, gradient in gradients.items():
        if gradient is not None and not _is_finite(gradient):
            raise WrongOutputError(f"{_share(gradient)} of the gradient of {name} are not finite.")


def _check_call(backend: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
    given = dict(zip("qkv", args, strict=False)) | named
    q, k, v = (given[name].detach() for name in "qkv")
    shape = [*q.shape[:-1], v.shape[-1]]
    wanted = f"expected a tensor {shape} of {q.dtype}"
    if not isinstance(output, Tensor):
        came = "None" if output is None else f"of type {type(output).__name__}"
        raise WrongOutputError(f"the output is {came}; {wanted}.")
    if list(output.shape) != shape:
        raise WrongOutputError(f"the output has shape {list(output.shape)}; {wanted}.")
    if output.dtype != q.dtype:
        raise WrongOutputError(f"the output has dtype {output.dtype}; {wanted}.")
    if output.device != q.device:
        raise WrongOutputError(f"the output is on {output.device}, but q on {q.device}.")
    if not _is_finite(output) and all(map(_is_finite, (q, k, v))):
        raise WrongOutputError(f"{_share(output)} of the output are not finite, although q, k and v are.")


@torch.no_grad()
def _is_finite(x: Tensor) -> bool:
    # Minimum and maximum are finite only if all entries are; unlike x.isfinite() they take no memory.
    return not x.numel() or all(map(torch.isfinite, x.detach().aminmax()))


def _share(x: Tensor) -> str:
    """Number of non-finite entries, with the total."""
    broken = int((~x.detach().isfinite()).sum())
    return f"{broken} of {x.numel()} entries"
