"""A model of a CUDA device for tests: a stream that works in order, and a host that runs ahead of it.

Kernels have durations, launches take time of the host, and events read when the stream reaches them.
Every use of the device is written down in `told`.
"""

import time
from contextlib import contextmanager

import torch

FLUSH_S, CLOCK_HZ = 85e-6, 2e9


class Device:
    """The times of host and stream, in seconds; `install` puts the model in the place of torch.cuda."""

    def __init__(self):
        self.host_s = self.stream_s = 0.0
        self.told = []

    def kernel(self, duration_s, *, launch_s=0.0):
        """One kernel, begun when it is launched and the stream has ended all earlier ones."""
        self.host_s += launch_s
        self.stream_s = max(self.stream_s, self.host_s) + duration_s

    def call(self, kernels, duration_s, launch_s):
        """A call of equal kernels."""

        def call():
            self.told.append("call")
            for _ in range(kernels):
                self.kernel(duration_s, launch_s=launch_s)

        return call

    def wait(self, *device):
        self.host_s = max(self.host_s, self.stream_s)

    def install(self, monkeypatch):
        model, told = self, self.told

        class Event:
            def __init__(self, *, enable_timing):
                assert enable_timing

            def record(self):
                told.append("event")
                self.at_s = max(model.stream_s, model.host_s)

            def synchronize(self):
                told.append("wait")
                model.wait()

            def elapsed_time(self, end):
                return 1000 * (end.at_s - self.at_s)

        class Buffer:
            def __init__(self, size, *, dtype, device):
                assert size * dtype.itemsize == 256_000_000 and device.startswith("cuda")

            def zero_(self):
                told.append("flush")
                model.kernel(FLUSH_S)

        @contextmanager
        def current(name):
            yield

        def spin(cycles):
            told.append("spin")
            model.kernel(cycles / CLOCK_HZ)

        def synchronize(*device):
            told.append("synchronise")
            model.wait()

        for name, stand_in in (("Event", Event), ("device", current), ("_sleep", spin)):
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
        monkeypatch.setattr(torch, "empty", Buffer)
        monkeypatch.setattr(time, "perf_counter", lambda: model.host_s)
        return self
