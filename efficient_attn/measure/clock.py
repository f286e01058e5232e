"""How long a call takes: raw samples, after a warm-up, on the CPU's clock or between CUDA events."""

import time
from collections.abc import Callable
from typing import TypeVar

Call = Callable[[], object]
Clock = Callable[[Call], float]
Turn = TypeVar("Turn")

# Two successive calls that differ by less than this share are taken for warmed up.
_AGREEMENT = 0.1


def clock(device: str) -> Clock:
    """A function that makes one call and returns its seconds, the device's own work included."""
    return _time_on_cuda if device.startswith("cuda") else _time_on_cpu


def warm_up(call: Call, time_call: Clock, *, limit_s: float) -> float:
    """Seconds of the last of as many calls as it takes until two agree, or until the limit is spent."""
    spent = last = time_call(call)
    while spent < limit_s:
        before, last = last, time_call(call)
        spent += last
        if abs(last - before) <= _AGREEMENT * last:
            break
    return last


def sample(call: Call, time_call: Clock, *, seconds: float, least: int, most: int) -> tuple[float, ...]:
    """Seconds of every call, for as many calls as fit into `seconds`, within `least` and `most`."""
    times_s: list[float] = []
    while len(times_s) < least or (sum(times_s) < seconds and len(times_s) < most):
        times_s.append(time_call(call))
    return tuple(times_s)


def in_turns(turns: list[Turn], *, rounds: int) -> list[Turn]:
    """Every item `rounds` times, in order and in reverse by turns, so that a drift hits all alike.

    The last round is in order, so that items are finished in it.
    """
    return [turn for left in reversed(range(rounds)) for turn in (turns[::-1] if left % 2 else turns)]


def _time_on_cpu(call: Call) -> float:
    start = time.perf_counter()
    # The result is kept until the clock is read: giving memory back is not part of the call.
    result = call()
    stop = time.perf_counter()
    del result
    return stop - start


def _time_on_cuda(call: Call) -> float:
    import torch

    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    result = call()
    stop.record()
    stop.synchronize()
    del result
    return float(start.elapsed_time(stop)) / 1000
