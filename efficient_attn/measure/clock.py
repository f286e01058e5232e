"""How long a call takes: raw samples, after a warm-up, on the CPU's clock or between CUDA events."""

import statistics
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

Call = Callable[[], object]
Clock = Callable[[Call], float]
Turn = TypeVar("Turn")

# Warmed up is when so many successive calls differ by at most this share of the fastest. Of two, a call that
# still gets faster by a little each time would be taken for warmed up.
_AGREEING, _AGREEMENT = 3, 0.1

_EMPTY_CALLS = 20


def clock(device: str) -> Clock:
    """A function that makes one call and returns its seconds, the device's own work included."""
    return partial(_time_on_cuda, device=device) if device.startswith("cuda") else _time_on_cpu


def warm_up(call: Call, time_call: Clock, *, limit_s: float, first: Call | None = None) -> float:
    """Seconds of the last of as many calls as it takes until three agree, or until the limit is spent.

    Args:
        first: The first of them, which may do more than the others.
    """
    last: deque[float] = deque([time_call(first or call)], maxlen=_AGREEING)
    spent_s = last[-1]
    while spent_s < limit_s and not _agree(last):
        last.append(time_call(call))
        spent_s += last[-1]
    return last[-1]


def _agree(times_s: deque[float]) -> bool:
    return len(times_s) == _AGREEING and max(times_s) <= (1 + _AGREEMENT) * min(times_s)


def empty_call_s(time_call: Clock) -> float:
    """Seconds that the clock tells for a call that does nothing: what every sample has too much."""
    return statistics.median(time_call(_nothing) for _ in range(_EMPTY_CALLS))


def _nothing() -> None:
    """Do nothing."""


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


def _time_on_cuda(call: Call, *, device: str) -> float:
    """Between two events on the device's own stream, which wait for nothing that was queued before.

    The second-level cache is not flushed between calls: a call finds its inputs where the call before left
    them, as in a model, where the projections have just written them.
    """
    import torch

    # Events and streams belong to the current device, which need not be the one that is measured.
    with torch.cuda.device(device):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        result = call()
        stop.record()
        stop.synchronize()
    del result
    return float(start.elapsed_time(stop)) / 1000
