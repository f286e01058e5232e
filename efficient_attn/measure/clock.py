"""Timing of calls: raw samples after a warm-up, by the CPU's clock or CUDA events, and device times.

Other processes lengthen calls most by keeping the core from them: times on one CPU thread are processor time.

Device times are of calls on CUDA that are queued while the device is busy, so that it waits for no launch. As
in `triton.testing.do_bench`, the L2 cache is flushed before each call, events enclose the call alone, and the
host waits once, after the last call. The flush hides some 0.1 ms of launches; a spinning kernel before it
hides the others. Launches stay visible in calls that synchronise, and in calls with more kernels than the
queue of the device holds (about 1000).
"""

import os
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from efficient_attn.measure.memory import Call

Clock = Callable[[Call], float]

# Warm-up ends when this many successive calls agree within this share of the fastest. Two calls would agree
# even while calls still get slightly faster.
_AGREEING, _AGREEMENT = 3, 0.1

# Numbers of rounds after which a run looks whether its speeds are decided.
LOOKS = (4, 8, 16, 32)

# State of the L2 cache when a call with a device time begins.
COLD = "cold"

# The flush of do_bench: larger than the L2 cache of any device so far.
_FLUSH_BYTES = 256_000_000

# Least device time of a warm-up, as in do_bench, during which clocks rise.
_WARM_UP_S = 0.025

# Cycles of the spinning kernel per second of enqueueing: twice the clock of a GPU, as a margin.
_CYCLES_PER_S = 4e9


def clock(device: str, threads: int = 1) -> Clock:
    """A function that makes one call and returns its duration in seconds, including the device's work."""
    if device.startswith("cuda"):
        return partial(_time_on_cuda, device=device)
    # The processor time of Windows is too coarse.
    alone = threads == 1 and os.name == "posix"
    return partial(_time_on_cpu, counter=time.process_time if alone else time.perf_counter)


def warm_up(call: Call, time_call: Clock, *, limit_s: float, first: Call | None = None) -> float:
    """Call until three successive durations agree or the limit is spent. Returns the last duration."""
    last: deque[float] = deque([time_call(first or call)], maxlen=_AGREEING)
    spent_s = last[-1]
    while spent_s < limit_s and (len(last) < _AGREEING or max(last) > (1 + _AGREEMENT) * min(last)):
        last.append(time_call(call))
        spent_s += last[-1]
    return last[-1]


def sample(call: Call, time_call: Clock, *, seconds: float, least: int, most: int) -> tuple[float, ...]:
    """Durations of repeated calls, at least `least` and at most `most`, within `seconds` in total."""
    times_s: list[float] = []
    while len(times_s) < least or (sum(times_s) < seconds and len(times_s) < most):
        times_s.append(time_call(call))
    return tuple(times_s)


def _time_on_cpu(call: Call, *, counter: Callable[[], float]) -> float:
    start = counter()
    # The result is kept alive until the clock is read, to exclude the deallocation.
    result = call()
    stop = counter()
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


class QueuedCalls:
    """A call on a CUDA device, after untimed preparation, and the time that the host takes to enqueue it."""

    def __init__(self, call: Call, device: str, before: Call) -> None:
        import torch

        self._call, self._device, self._before = call, device, before
        self._flushed = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)
        self._enqueue_s = 0.0

    def warm_up(self) -> None:
        """Flush and call until both have taken 25 ms on the device, and measure the time of enqueueing."""
        worked_s, enqueue_s = 0.0, []

        def flushed_call() -> None:
            self._flushed.zero_()
            before_s = time.perf_counter()
            self._call()
            enqueue_s.append(time.perf_counter() - before_s)

        while worked_s < _WARM_UP_S:
            self._before()
            worked_s += _time_on_cuda(flushed_call, device=self._device)
        # The first calls may allocate; a call that is interrupted lasts longer than it needs.
        self._enqueue_s = min(enqueue_s)

    def times(self, count: int) -> tuple[float, ...]:
        """Device seconds of `count` calls after `warm_up`, in order."""
        import torch

        hold = int(self._enqueue_s * _CYCLES_PER_S)
        with torch.cuda.device(self._device):
            events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(count)]
            for start, stop in events:
                self._before()
                # torch's tests hold streams by this function, which touches no memory.
                torch.cuda._sleep(hold)
                self._flushed.zero_()
                start.record()
                self._call()
                stop.record()
            torch.cuda.synchronize()
        return tuple(start.elapsed_time(stop) / 1000 for start, stop in events)
