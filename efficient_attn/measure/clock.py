"""Timing of calls: raw samples after a warm-up, by the CPU's clock or CUDA events."""

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

Call = Callable[[], object]
Clock = Callable[[Call], float]
Turn = TypeVar("Turn")

# Warm-up ends when this many successive calls agree within this share of the fastest. Two calls are not
# enough: a call that keeps getting slightly faster would pass.
_AGREEING, _AGREEMENT = 3, 0.1


def clock(device: str) -> Clock:
    """A function that makes one call and returns its duration in seconds, including the device's work."""
    return partial(_time_on_cuda, device=device) if device.startswith("cuda") else _time_on_cpu


def warm_up(call: Call, time_call: Clock, *, limit_s: float, first: Call | None = None) -> float:
    """Call until three successive durations agree or the limit is spent; returns the last duration.

    Args:
        first: The first call, which may do more than the others.
    """
    last: deque[float] = deque([time_call(first or call)], maxlen=_AGREEING)
    spent_s = last[-1]
    while spent_s < limit_s and not _agree(last):
        last.append(time_call(call))
        spent_s += last[-1]
    return last[-1]


def _agree(times_s: deque[float]) -> bool:
    return len(times_s) == _AGREEING and max(times_s) <= (1 + _AGREEMENT) * min(times_s)


def sample(call: Call, time_call: Clock, *, seconds: float, least: int, most: int) -> tuple[float, ...]:
    """Durations of repeated calls, at least `least` and at most `most`, within `seconds` in total."""
    times_s: list[float] = []
    while len(times_s) < least or (sum(times_s) < seconds and len(times_s) < most):
        times_s.append(time_call(call))
    return tuple(times_s)


def in_turns(turns: list[Turn], *, rounds: int) -> list[Turn]:
    """Every item `rounds` times, alternately in forward and reverse order, so that drift affects all alike.

    The last round is in forward order, so that items finish in order.
    """
    return [turn for left in reversed(range(rounds)) for turn in (turns[::-1] if left % 2 else turns)]


def _time_on_cpu(call: Call) -> float:
    start = time.perf_counter()
    # The result is kept alive until the clock is read, to exclude the deallocation.
    result = call()
    stop = time.perf_counter()
    del result
    return stop - start


def _time_on_cuda(call: Call, *, device: str) -> float:
    """Duration between two events on the device's current stream, after all earlier work has finished.

    The L2 cache is not flushed between calls, so that inputs are cached as in a model, where projections have
    just written them.
    """
    import torch

    # Events and streams belong to the current device, which may differ from the measured one.
    with torch.cuda.device(device):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        result = call()
        stop.record()
        stop.synchronize()
    del result
    return float(start.elapsed_time(stop)) / 1000
