"""Peak memory of a call, in bytes above the level before it.

On the CPU the allocator's events, as recorded by the profiler, give the peak to the byte, including kernel
workspaces. The events come from a private part of torch, which a known pattern of allocations tests.
"""

import functools
import gc
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

from efficient_attn.errors import UnsupportedError

Call = Callable[[], Any]

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class Peak(NamedTuple):
    """Bytes above the level before the call, at the peak and held by the result."""

    peak_bytes: int
    kept_bytes: int


def peak(call: Call, *, device: str) -> Peak:
    """Peak memory of one call. Warm up first, since one-time allocations are counted too."""
    if device.startswith("cuda"):
        return _cuda_peak(call, device)
    if not allocations_are_seen():
        raise UnsupportedError("The profiler of this torch reports no allocations on the CPU.")
    return _allocation_peak(call)


@functools.cache
def allocations_are_seen() -> bool:
    """Whether a known allocation is measured to the byte."""
    import torch

    try:
        return _allocation_peak(lambda: torch.empty(1 << 20, dtype=torch.uint8)) == (1 << 20, 1 << 20)
    except (AttributeError, RuntimeError):
        return False


def parameter_bytes(module: Any) -> int:
    """Bytes of the parameters and buffers of a module."""
    return state_bytes([*module.parameters(), *module.buffers()])


def state_bytes(state: Any) -> int:
    """Bytes of the tensors in a state: a tensor, or tuples of states."""
    storages = (tensor.untyped_storage() for tensor in tensors_in(state))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _allocation_peak(call: Call) -> Peak:
    from torch.profiler import ProfilerActivity, profile

    # Accumulating events would convert them to Python objects, which takes six times as long as reading them.
    settings: dict[str, Any] = {"profile_memory": True, "acc_events": False}
    # The profiler writes to stderr otherwise.
    with mock.patch.dict(os.environ, {"KINETO_LOG_LEVEL": "99", **os.environ}), warnings.catch_warnings():
        # Some versions, such as torch 2.11, warn in the first cycle that later cycles clear its events.
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        # A collection during the call would count what others leave behind.
        collecting = gc.isenabled()
        gc.disable()
        try:
            with profile(activities=[ProfilerActivity.CPU], **settings) as run:
                result = call()
        finally:
            if collecting:
                gc.enable()
    sizes = [size for _, size in sorted(_allocations(run), key=lambda event: event[0])]
    del result
    levels = [0, *itertools.accumulate(sizes)]
    return Peak(max(levels), levels[-1])


def _allocations(run: Any) -> Iterator[tuple[int, int]]:
    """Time and size of every allocation on the CPU. Frees have negative sizes."""
    from torch._C._profiler import _EventType

    nodes = list(run.profiler.kineto_results.experimental_event_tree())
    while nodes:
        node = nodes.pop()
        nodes.extend(node.children)
        if node.tag == _EventType.Allocation and node.extra_fields.device.type == "cpu":
            yield node.start_time_ns, node.extra_fields.alloc_size


def _cuda_peak(call: Call, device: str) -> Peak:
    import torch

    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    level = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    kept_bytes = torch.cuda.memory_allocated(device) - level
    del result
    return Peak(torch.cuda.max_memory_allocated(device) - level, kept_bytes)


def tensors_in(value: Any) -> Iterator[Any]:
    """All tensors in nested tuples, lists and dictionaries."""
    import torch
    from torch.utils._pytree import tree_iter

    return (leaf for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor))
