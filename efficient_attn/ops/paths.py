"""Choice between algorithms for the caches of a CPU and algorithms of few, large operations."""

import os

from torch import Tensor

# "torch" takes the path of other devices on the CPU too, by PyTorch's operators alone.
VARIABLE = "EFFICIENT_ATTN_KERNELS"


def tuned_for_cpu(x: Tensor) -> bool:
    """Whether the algorithms for the CPU serve a tensor."""
    return x.device.type == "cpu" and os.environ.get(VARIABLE) != "torch"
