"""Outputs of any model as one vector."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from efficient_attn.errors import DataError


def output_vector(output: Any) -> Tensor:
    """All floating-point tensors of nested tuples, lists and dicts as one vector.

    An object of another class counts by its first tensor of more than one number.

    Raises:
        DataError: If there is none.
    """
    found = [tensor.detach().flatten() for tensor in _tensors(output)]
    if not found:
        raise DataError(f"The model returns {type(output).__name__} without a floating-point tensor.")
    return torch.cat([tensor.to(found[0].device) for tensor in found])


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield from [output] if output.is_floating_point() else []
    elif isinstance(output, (tuple, list)) or type(output) is dict:
        for part in output.values() if isinstance(output, dict) else output:
            yield from _tensors(part)
    else:
        parts = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
        # A loss, a single number, stands first in many outputs.
        direct = (part for part in parts.values() if isinstance(part, Tensor) and part.numel() > 1)
        yield from islice((tensor for part in direct for tensor in _tensors(part)), 1)
