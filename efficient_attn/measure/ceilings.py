"""Ceilings of a GPU: rates of a large copy and of a large matrix product, by the clock of device times.

A CPU has none here: a rate of a moment bounds no call where other processes come and go.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from efficient_attn.measure.queued import QueuedCalls

# Several times the L2 cache, and a product that fills all multiprocessors.
_COPIED_BYTES, _ROWS = 1 << 28, 8192

# Timed calls, of which the fastest counts; few, since some devices take seconds for a product in float64.
_CALLS = 5


class Ceilings(NamedTuple):
    """Highest measured rates; None on a CPU, and where the memory does not suffice."""

    copy_bytes_per_s: float | None = None
    matmul_flops_per_s: float | None = None


@cache
def ceilings(device: str, dtype: str) -> Ceilings:
    """The ceilings of a device, measured once per process; bytes are counted as read and as written."""
    if not device.startswith("cuda"):
        return Ceilings()
    return Ceilings(
        _rate(2 * _COPIED_BYTES, lambda: _copy(device), device),
        _rate(2 * _ROWS**3, lambda: _matmul(device, dtype), device),
    )


def _copy(device: str) -> Callable[[], object]:
    import torch

    source = torch.zeros(_COPIED_BYTES, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _matmul(device: str, dtype: str) -> Callable[[], object]:
    import torch

    # Zeros take less power than data, and let the clocks rise higher.
    generator = torch.Generator(device).manual_seed(0)
    factor = torch.randn(_ROWS, _ROWS, generator=generator, device=device, dtype=getattr(torch, dtype))
    product = torch.empty_like(factor)
    return lambda: torch.mm(factor, factor, out=product)


def _rate(amount: int, prepared: Callable[[], Callable[[], object]], device: str) -> float | None:
    """The amount over the fastest of several calls."""
    import torch

    try:
        queued = QueuedCalls(prepared(), device)
        queued.warm_up()
        return amount / min(queued.times(_CALLS))
    except torch.OutOfMemoryError:
        return None
