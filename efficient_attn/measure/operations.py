"""Operation counts of a call: FLOPs, and the longest chain of dependent matrix products.

The counts cover the products known to `torch.utils.flop_counter`, with a multiplication and an addition as
two operations. Opaque kernels are replaced by naive attention, which multiplies the same matrices; on the
meta device, where nothing is computed, backends use no other kernels.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from efficient_attn.measure.memory import tensors_in


class Operations(NamedTuple):
    """Operations of all products, and the length of the longest chain of dependent ones."""

    flops: int
    sequential: int


def count_operations(call: Callable[[], object]) -> Operations:
    """Count the operations of one call, on the CPU or, to see into every kernel, on the meta device."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    flops = 0
    # Chain length behind every storage; an operator that writes to a storage sets it.
    waited: dict[int, int] = {}

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal flops
            kwargs = kwargs or {}
            result = func(*args, **kwargs)
            depth = max((waited.get(_storage(x), 0) for x in tensors_in((args, kwargs))), default=0)
            formula = flop_registry.get(func.overloadpacket)
            if formula is not None:
                flops += int(formula(*args, **kwargs, out_val=result))
                depth += 1
            waited.update((_storage(x), depth) for x in tensors_in(result))
            return result

    with _written_out(), torch.no_grad(), Count():
        call()
    return Operations(flops, max(waited.values(), default=0))


@contextmanager
def _written_out() -> Iterator[None]:
    """Replace fused attention by two products, and recurrent layers by a loop over tokens."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)
