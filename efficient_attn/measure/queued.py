"""Device time of calls on CUDA that are queued while the device is busy, so that it waits for no launch.

As in `triton.testing.do_bench`, the L2 cache is flushed before each call, events enclose the call alone, and
the host waits once, after the last call. The flush hides some 0.1 ms of launches; a spinning kernel before it
hides the others: the call begins after the host has enqueued all of it. Launches stay visible in calls that
synchronise, and in calls with more kernels than the queue of the device holds (about 1000).
"""

import time
from collections.abc import Callable

# State of the L2 cache when a call begins.
COLD, WARM = L2 = ("cold", "warm")

# The flush of do_bench: larger than the L2 cache of any device so far.
_FLUSH_BYTES = 256_000_000

# Least device time of a warm-up, as in do_bench, during which clocks rise.
_WARM_UP_S = 0.025

# Cycles of the spinning kernel per second of enqueueing: twice the clock of a GPU, as a margin.
_CYCLES_PER_S = 4e9


class QueuedCalls:
    """A call on a CUDA device with the time that the host takes to enqueue it.

    Args:
        l2: `cold` flushes the L2 cache before each call; `warm` leaves the data of the previous call in it.
    """

    def __init__(self, call: Callable[[], object], device: str, *, l2: str = COLD) -> None:
        import torch

        self._call, self._device, self._l2 = call, device, l2
        self._flushed = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)
        self._enqueue_s = 0.0

    def warm_up(self) -> None:
        """Flush and call until both have taken 25 ms on the device; learn the time of enqueueing."""
        import torch

        worked_s, enqueue_s = 0.0, []
        with torch.cuda.device(self._device):
            while worked_s < _WARM_UP_S:
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                self._flushed.zero_()
                before_s = time.perf_counter()
                self._call()
                enqueue_s.append(time.perf_counter() - before_s)
                stop.record()
                stop.synchronize()
                worked_s += start.elapsed_time(stop) / 1000
        # The first calls may allocate; a call that is interrupted lasts longer than it needs.
        self._enqueue_s = min(enqueue_s)

    def times(self, count: int) -> tuple[float, ...]:
        """Device seconds of `count` calls after `warm_up`, in order."""
        import torch

        hold = int(self._enqueue_s * _CYCLES_PER_S)
        with torch.cuda.device(self._device):
            events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(count)]
            if self._l2 == WARM:
                self._call()
            for start, stop in events:
                # torch's own tests hold streams by this function; it touches no memory.
                torch.cuda._sleep(hold)
                if self._l2 == COLD:
                    self._flushed.zero_()
                start.record()
                self._call()
                stop.record()
            torch.cuda.synchronize()
        return tuple(start.elapsed_time(stop) / 1000 for start, stop in events)
