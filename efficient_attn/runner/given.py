"""Files of the q, k, v that a case is measured on, for transfer between processes."""

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from efficient_attn.measure.inputs import Activations, read_activations


class Given(NamedTuple):
    """Content of a file.

    Attributes:
        tensors: q, k, v, and an upstream gradient.
        scale: Factor on q·k; None: 1/√head_dim.
    """

    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    scale: float | None


def write_given(path: str | Path, activations: Activations, *, scale: float) -> None:
    """Write the first sequence's q, k, v in their dtype, in the format of `read_activations`."""
    named = zip(Activations._fields, activations, strict=True)
    tensors = {name: tensor[:1].cpu().contiguous() for name, tensor in named}
    save_file(tensors, path, metadata={"scale": repr(scale)})


# Cached: all backends of a comparison share the same inputs.
@functools.lru_cache(maxsize=1)
def read_given(path: str, dtype: str, device: str, batch: int = 1) -> Given:
    """A batch of copies of the q, k, v of a file, and an upstream gradient of ones."""
    captured = read_activations(path)
    (layer,) = captured.layers.values()
    place = {"device": device, "dtype": getattr(torch, dtype)}
    q, k, v = (tensor.to(**place).repeat(batch, 1, 1, 1) for tensor in layer)
    return Given((q, k, v, q.new_ones(*q.shape[:-1], v.shape[-1])), captured.scale)
