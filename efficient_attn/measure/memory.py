"""Peak memory of a call, in bytes above the level before it.

On the CPU the allocator's events, as recorded by the profiler, give the peak to the byte, including kernel
workspaces. The events come from a private part of torch, which a known pattern of allocations tests.
"""

import functools
import gc
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from efficient_attn.errors import UnsupportedError

Call = Callable[[], object]

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class Peak(NamedTuple):
    """Bytes above the level before the call: at the peak, and still held by the result."""

    peak_bytes: int
    kept_bytes: int


def peak(call: Call, *, device: str) -> Peak:
    """Peak memory of one call; warm up first, since one-time allocations are counted too."""
    if device.startswith("cuda"):
        return _cuda_peak(call, device)
    if not allocations_are_seen():
        raise UnsupportedError("The profiler of this torch reports no allocations on the CPU.")
    return _allocation_peak(call)


@functools.cache
def allocations_are_seen() -> bool:
    """Whether a known pattern of allocations is measured to the byte; tested once per process."""
    import torch

    sizes, remaining = (1 << 20, 1 << 19), 1 << 10

    def pattern() -> Any:
        scratch = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        scratch.clear()
        return torch.empty(remaining, dtype=torch.uint8)

    try:
        return _allocation_peak(pattern) == (sum(sizes), remaining)
    except (AttributeError, RuntimeError):
        return False


def parameter_bytes(module: Any) -> int:
    """Bytes of the parameters and buffers of a module."""
    return _bytes([*module.parameters(), *module.buffers()])


def state_bytes(state: Any) -> int:
    """Bytes of the tensors in a state: a tensor, or tuples of states."""
    return _bytes(tensors_in(state))


def _allocation_peak(call: Call) -> Peak:
    from torch.profiler import ProfilerActivity, profile

    gc.collect()
    # Accumulating events would convert them to Python objects, which takes six times as long as reading them.
    settings: dict[str, Any] = {"profile_memory": True, "acc_events": False}
    with _quiet_profiler(), warnings.catch_warnings():
        # Some versions, torch 2.11 for one, warn in the first cycle that later ones clear its events.
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        with profile(activities=[ProfilerActivity.CPU], **settings) as run:
            result = call()
    sizes = [size for _, size in sorted(_allocations(run), key=lambda event: event[0])]
    del result
    level = highest = 0
    for size in sizes:
        level += size
        highest = max(highest, level)
    return Peak(highest, level)


def _allocations(run: Any) -> Iterator[tuple[int, int]]:
    """Time and size of every allocation on the CPU; frees are negative."""
    from torch._C._profiler import _EventType

    nodes = list(run.profiler.kineto_results.experimental_event_tree())
    while nodes:
        node = nodes.pop()
        nodes.extend(node.children)
        if node.tag == _EventType.Allocation and node.extra_fields.device.type == "cpu":
            yield node.start_time_ns, node.extra_fields.alloc_size


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "99"
    try:
        yield
    finally:
        del os.environ[name]


def _cuda_peak(call: Call, device: str) -> Peak:
    import torch

    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    after = torch.cuda.memory_stats(device)
    del result
    level = before["allocated_bytes.all.current"]
    highest, current = (after[f"allocated_bytes.all.{name}"] - level for name in ("peak", "current"))
    return Peak(highest, current)


def tensors_in(value: Any) -> Iterator[Any]:
    """All tensors in nested tuples, lists and dictionaries."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def _bytes(tensors: Iterable[Any]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
