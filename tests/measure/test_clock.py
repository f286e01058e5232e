"""The clock: what a call takes, whatever else happens."""

import os
import time
from contextlib import nullcontext

import pytest
import torch
from synthetic_records import case

from efficient_attn.measure import worker
from efficient_attn.measure.clock import QueuedCalls, clock, sample, warm_up


def spin(cpu_s):
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        pass


@pytest.mark.skipif(os.name != "posix", reason="processor time is too coarse")
def test_one_thread_is_timed_by_its_processor_and_several_by_wall_clock():
    def call():
        spin(0.01)
        time.sleep(0.04)

    assert 0.01 <= clock("cpu")(call) < 0.04 and clock("cpu", 2)(call) >= 0.05
    record = worker.time_of(case("time", "f", 4, threads=1), call, seconds=0.0)
    assert min(record.times_s) < 0.04


@pytest.mark.parametrize(("once_s", "expected"), [(0.01, 1), (1.0, 3)])
def test_a_long_call_is_its_own_warm_up(once_s, expected):
    calls = []

    def call():
        calls.append(time.sleep(0.02))

    record = worker.time_of(case("time", "f", 4, threads=2), call, seconds=0.0, least=2, once_s=once_s)
    assert len(calls) == expected and len(record.times_s) == record.round_sizes[0] == min(expected, 2)


def test_giving_the_result_back_is_not_part_of_the_time():
    class Slow:
        def __del__(self):
            time.sleep(0.05)

    assert min(clock("cpu", 2)(Slow) for _ in range(3)) < 0.02


def test_warming_up_ends_when_three_calls_agree_or_the_limit_is_spent():
    def clock_of(times_s):
        return lambda call: times_s.pop(0)

    steady = [9.0, 3.0, 1.0, 1.05, 1.1, 7.0]
    assert warm_up(None, clock_of(steady), limit_s=100) == 1.1 and steady == [7.0]
    endless = [3.0, 1.0, 3.0, 1.0, 3.0]
    assert warm_up(None, clock_of(endless), limit_s=4) == 1.0 and endless == [3.0, 1.0, 3.0]
    # A call that still gets faster by 6 % each time is not warm, although two in a row agree.
    falling = [1.0 * 0.94**i for i in range(9)]
    warm_up(None, clock_of(falling), limit_s=5)
    assert len(falling) == 9 - 6


def test_samples_fill_the_time_within_their_least_and_most():
    for time_s, (least, most), count in ((5.0, (2, 9), 2), (0.25, (1, 9), 4), (0.01, (1, 3), 3)):
        samples = sample(None, lambda call, time_s=time_s: time_s, seconds=1, least=least, most=most)
        assert samples == (time_s,) * count


FLUSH_S, CLOCK_HZ = 85e-6, 2e9


class Device:
    """CUDA device with an in-order stream, and a host that runs ahead of it. `told` lists every use."""

    def __init__(self, monkeypatch):
        self.host_s = self.stream_s = 0.0
        self.told = told = []
        device = self

        class Event:
            def __init__(self, *, enable_timing):
                assert enable_timing

            def record(self):
                told.append("event")
                self.at_s = max(device.stream_s, device.host_s)

            def synchronize(self):
                device.wait("wait")

            def elapsed_time(self, end):
                return 1000 * (end.at_s - self.at_s)

        class Buffer:
            def __init__(self, size, *, dtype, device):
                assert size * dtype.itemsize == 256_000_000 and device.startswith("cuda")

            def zero_(self):
                told.append("flush")
                device.work(FLUSH_S)

        def spin(cycles):
            told.append("spin")
            device.work(cycles / CLOCK_HZ)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "device", nullcontext)
        # PyTorch has no public function that keeps a GPU busy.
        monkeypatch.setattr(torch.cuda, "_sleep", spin)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: device.wait("synchronise"))
        monkeypatch.setattr(torch, "empty", Buffer)
        monkeypatch.setattr(time, "perf_counter", lambda: device.host_s)

    def work(self, duration_s):
        """One kernel, begun when it is launched and the stream has ended all earlier ones."""
        self.stream_s = max(self.stream_s, self.host_s) + duration_s

    def wait(self, event):
        self.told.append(event)
        self.host_s = max(self.host_s, self.stream_s)

    def call(self, kernels, duration_s, launch_s):
        """A call of equal kernels."""

        def call():
            self.told.append("call")
            for _ in range(kernels):
                self.host_s += launch_s
                self.work(duration_s)

        return call


# Number of kernels, seconds of a kernel and of its launch. A flush hides the launch of the first call; the
# launches of the second one take longer than its kernels and a flush.
SHORT, MANY = (1, 20e-6, 5e-6), (60, 2e-6, 6e-6)


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


def nothing():
    pass


def queued(device, kind, count, before=nothing):
    calls = QueuedCalls(device.call(*kind), "cuda:1", before)
    calls.warm_up()
    device.told.clear()
    return calls.times(count)


def test_cold_calls_are_queued_in_the_order_of_do_bench_behind_a_spinning_kernel(device):
    assert queued(device, SHORT, 3) == pytest.approx([20e-6] * 3)
    # Without spinning this is the loop of triton.testing.do_bench (Triton 3.x).
    assert device.told == [*["spin", "flush", "event", "call", "event"] * 3, "synchronise"]
    # No launches are seen where a flush does not hide them; on an idle stream they are.
    assert queued(device, MANY, 5) == pytest.approx([60 * 2e-6] * 5)
    assert clock("cuda")(device.call(*MANY)) == pytest.approx(60 * 6e-6 + 2e-6)


def test_a_preparation_is_untimed_and_precedes_the_spinning_kernel(device):
    def prepare():
        device.told.append("prepare")
        device.work(7.0)

    assert queued(device, SHORT, 2, before=prepare) == pytest.approx([20e-6] * 2)
    assert device.told == [*["prepare", "spin", "flush", "event", "call", "event"] * 2, "synchronise"]


@pytest.mark.parametrize(("kind", "each_s"), [(SHORT, FLUSH_S + 20e-6), ((1, 3.0, 0.0), 3.0)])
def test_a_warm_up_is_25_ms_of_device_work_and_no_more_calls_than_that_takes(device, kind, each_s):
    QueuedCalls(device.call(*kind), "cuda", nothing).warm_up()
    calls = device.told.count("call")
    assert (calls - 1) * each_s < 0.025 <= calls * each_s


@pytest.mark.parametrize("l2", ["cold", None])
def test_a_gpu_is_warmed_up_then_timed_alone_then_as_often_in_a_queue(device, l2):
    record = worker.time_of(case("time", "f", 64, device="cuda", l2=l2), device.call(*SHORT), seconds=1e-3)
    count = len(record.times_s)
    assert record.times_s == pytest.approx([25e-6] * count) and record.round_sizes == (count,)
    told = "".join(event[0] for event in device.told)
    timed = "secew" * count
    if l2 is None:
        assert record.device_times_s is None and told.endswith("efcew" + timed)
    else:
        assert record.device_times_s == pytest.approx([20e-6] * count)
        assert told.endswith("efcew" + timed + "sfece" * count + "s")
