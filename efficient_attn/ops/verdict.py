"""Whether kernels have passed their check on this machine."""

import os

import torch


def trusted(kernel: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel may serve calls on a device."""
    return os.environ.get("EFFICIENT_ATTN_UNPROVED_KERNELS") == "1"
