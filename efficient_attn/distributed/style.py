"""`context_parallel` as a style of `parallelize_module`."""

from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from efficient_attn.distributed.calls import in_force
from efficient_attn.distributed.layout import KINDS, layout_of
from efficient_attn.options import one_of


class ContextParallel(ParallelStyle):
    """Style of `parallelize_module` that puts every forward pass of a module inside `context_parallel`.

    Args:
        layout: As for `context_parallel`.
    """

    def __init__(self, layout: str = "contiguous") -> None:
        one_of("layout", layout, KINDS)
        self._kind = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layout, entered = layout_of(device_mesh, self._kind), list[AbstractContextManager[Any]]()

        def enter(*_: Any) -> None:
            entered.append(in_force(layout))
            entered[-1].__enter__()

        def leave(*_: Any) -> None:
            entered.pop().__exit__(None, None, None)

        module.register_forward_pre_hook(enter)
        # The layout is left after an exception too.
        module.register_forward_hook(leave, always_call=True)
        return module
