"""Choice between algorithms tuned for the CPU's caches and algorithms of few, large operations for other devices."""

import os

from torch import Tensor

# "torch" takes the path of other devices on the CPU too, by PyTorch's operators alone.
VARIABLE = "EFFICIENT_ATTN_KERNELS"


def tuned_for_cpu(x: Tensor) -> bool:
    """Whether the algorithms for the CPU serve a tensor."""
    return x.device.type == "cpu" and os.environ.get(VARIABLE) != "torch"
