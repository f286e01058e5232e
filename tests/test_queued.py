"""Device times on a model of a CUDA device, beside the loop of triton.testing.do_bench."""

import statistics
from itertools import cycle

import pytest
import torch
from device_model import FLUSH_S, Device
from made_records import case

from efficient_attn.measure import clock as module
from efficient_attn.measure import worker
from efficient_attn.measure.clock import Ceilings, QueuedCalls, ceilings, clock
from efficient_attn.measure.record import Record, merge_rounds

# Number of kernels, seconds of a kernel and of its launch. A flush hides the launch of the first call; the
# launches of the second one take longer than its kernels and a flush.
SHORT, MANY = (1, 20e-6, 5e-6), (60, 2e-6, 6e-6)


@pytest.fixture
def device(monkeypatch):
    return Device().install(monkeypatch)


def do_bench(call, repetitions):
    """The loop of triton.testing.do_bench (Triton 3.x), without its warm-up."""
    buffer = torch.empty(256_000_000 // 4, dtype=torch.int, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repetitions)]
    for start, stop in events:
        buffer.zero_()
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) / 1000 for start, stop in events)


def queued(device, kind, l2="cold"):
    made = QueuedCalls(device.call(*kind), "cuda:1", l2=l2)
    made.warm_up()
    device.told.clear()
    return made


def test_cold_calls_are_queued_in_the_order_of_do_bench_behind_a_spinning_kernel(device):
    queued(device, SHORT).times(3)
    found = device.told.copy()
    assert found == [*["spin", "flush", "event", "call", "event"] * 3, "synchronise"]
    device.told.clear()
    do_bench(device.call(*SHORT), 3)
    assert device.told == [one for one in found if one != "spin"]


def test_device_times_are_those_of_do_bench_where_a_flush_hides_the_launches(device):
    times_s = queued(device, SHORT).times(5)
    assert times_s == pytest.approx([20e-6] * 5)
    assert statistics.median(times_s) == pytest.approx(do_bench(device.call(*SHORT), 5))


def test_device_times_hold_no_launches_where_a_flush_does_not_hide_them(device):
    assert queued(device, MANY).times(5) == pytest.approx([60 * 2e-6] * 5)
    # The model tells the difference: on an idle stream, and behind a flush alone, launches are seen.
    assert clock("cuda")(device.call(*MANY)) == pytest.approx(60 * 6e-6 + 2e-6)
    torch.cuda.synchronize()
    assert do_bench(device.call(*MANY), 1) == pytest.approx(60 * 6e-6 + 2e-6 - FLUSH_S)


def test_warm_calls_follow_a_call_and_flush_nothing(device):
    queued(device, SHORT, l2="warm").times(2)
    assert device.told == ["call", *["spin", "event", "call", "event"] * 2, "synchronise"]


@pytest.mark.parametrize(("kind", "each_s"), [(SHORT, FLUSH_S + 20e-6), ((1, 3.0, 0.0), 3.0)])
def test_a_warm_up_is_25_ms_of_device_work_and_no_more_calls_than_that_takes(device, kind, each_s):
    QueuedCalls(device.call(*kind), "cuda").warm_up()
    calls = device.told.count("call")
    assert (calls - 1) * each_s < 0.025 <= calls * each_s


@pytest.mark.parametrize("l2", ["cold", None])
def test_a_gpu_is_warmed_up_then_timed_alone_then_as_often_in_a_queue(device, l2):
    record = worker.time_of(case("time", "f", 64, device="cuda", l2=l2), device.call(*SHORT), seconds=1e-3)
    count = len(record.times_s)
    assert record.times_s == pytest.approx([25e-6] * count) and record.round_sizes == (count,)
    told = "".join(one[0] for one in device.told)
    timed = "secew" * count
    if l2 is None:
        assert record.device_times_s is None and told.endswith("efcew" + timed)
    else:
        assert record.device_times_s == pytest.approx([20e-6] * count)
        assert told.endswith("efcew" + timed + "sfece" * count + "s")


def test_rounds_are_merged_with_their_device_times():
    one = case("time", "f", 64, device="cuda", l2="cold")
    parts = [
        Record(case=one, times_s=(2.0, 3.0), device_times_s=(1.0, 1.5), round_sizes=(2,)),
        Record(case=one, times_s=(4.0,), device_times_s=(2.0,), round_sizes=(1,)),
    ]
    merged = merge_rounds(parts)
    assert merged.device_times_s == (1.0, 1.5, 2.0) and merged.round_sizes == (2, 1)
    assert merge_rounds([Record(case=one, times_s=(2.0,), round_sizes=(1,))]).device_times_s is None


def test_ceilings_are_amounts_over_the_fastest_call_and_none_without_memory(device, monkeypatch):
    durations_s = cycle([0.5, 0.25])
    monkeypatch.setattr(module, "_copy", lambda name: lambda: device.kernel(next(durations_s)))
    monkeypatch.setattr(module, "_matmul", lambda name, dtype: device.call(1, 0.5, 0.0))
    found = ceilings.__wrapped__("cuda", "bfloat16")
    assert found == (pytest.approx(2 * 2**28 / 0.25), pytest.approx(2 * 8192**3 / 0.5))

    def exhausted(*about):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(module, "_matmul", exhausted)
    assert ceilings.__wrapped__("cuda", "bfloat16") == (pytest.approx(found.copy_bytes_per_s), None)
    assert ceilings.__wrapped__("cpu", "float32") == Ceilings(None, None)


def test_the_calls_of_ceilings_copy_and_multiply(monkeypatch):
    monkeypatch.setattr(module, "_COPIED_BYTES", 8)
    monkeypatch.setattr(module, "_ROWS", 4)
    assert module._copy("cpu")().tolist() == [0] * 8
    product = module._matmul("cpu", "float64")()
    assert product.shape == (4, 4) and product.dtype == torch.float64 and product.any()
