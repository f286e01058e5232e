"""Choice between algorithms for the caches of a CPU and algorithms of few, large operations."""

import os

import torch
from torch import Tensor

# "torch" takes the path of other devices on the CPU too, by PyTorch's operators alone.
VARIABLE = "EFFICIENT_ATTN_KERNELS"
# Numbers in the largest tensor of a step on other devices: the memory is bounded, and few steps are needed.
HELD = 2**25


def tuned_for_cpu(x: Tensor) -> bool:
    """Whether the algorithms for the CPU serve a tensor."""
    return x.device.type == "cpu" and not only_torch()


def only_torch() -> bool:
    """Whether the environment asks for PyTorch's operators alone."""
    return os.environ.get(VARIABLE) == "torch"


def kernels(device: torch.device, dtype: torch.dtype) -> str:
    """Kernels that serve attention on a device: "cpu", tuned for its caches, or "torch", operators alone."""
    return "cpu" if device.type == "cpu" and not only_torch() else "torch"


def held(numbers: int) -> int:
    """Parts of this many numbers that a step holds on other devices; at least 1."""
    return max(HELD // max(numbers, 1), 1)
