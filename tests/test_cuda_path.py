"""The path of a GPU without one: a stand-in for torch.cuda writes down which calls come in which order."""

from contextlib import contextmanager

import pytest
import torch

from efficient_attn.measure import memory
from efficient_attn.measure.clock import clock
from efficient_attn.runner import worker
from efficient_attn.runner.records import Case


@pytest.fixture
def calls(monkeypatch):
    """What was called on the stand-in, in order."""
    told = []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing
            self.name = "stop" if "event start" in told else "start"
            told.append(f"event {self.name}")

        def record(self):
            told.append(f"record {self.name}")

        def synchronize(self):
            told.append(f"wait for {self.name}")

        def elapsed_time(self, end):
            assert (self.name, end.name) == ("start", "stop")
            told.append("elapsed")
            return 2.5  # in milliseconds

    @contextmanager
    def device(name):
        told.append(f"enter {name}")
        yield
        told.append(f"leave {name}")

    def stats(name):
        told.append(f"stats {name}")
        later = told.count(f"stats {name}") > 1
        return {
            "allocated_bytes.all.current": 1000 + 512 * later,
            "allocated_bytes.all.peak": 5096,
        }

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda *name: told.append(" ".join(["synchronise", *name]))
    )
    monkeypatch.setattr(torch.cuda, "memory_stats", stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda name: told.append(f"reset {name}"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("empty the cache"))
    return told


def test_a_call_is_timed_between_two_events_of_its_device_after_all_earlier_work(calls):
    assert clock("cuda:1")(lambda: calls.append("call")) == 2.5 / 1000
    assert calls == [
        "enter cuda:1",
        "event start",
        "event stop",
        "synchronise",
        "record start",
        "call",
        "record stop",
        "wait for stop",
        "leave cuda:1",
        "elapsed",
    ]


def test_the_peak_is_taken_above_what_was_there_once_the_device_has_nothing_left_to_do(calls):
    found = memory.peak(lambda: calls.append("call"), device="cuda:1")
    assert found == (4096, 512, memory.CUDA_ALLOCATED)
    assert calls == [
        "synchronise cuda:1",
        "reset cuda:1",
        "stats cuda:1",
        "call",
        "synchronise cuda:1",
        "stats cuda:1",
    ]


def test_out_of_memory_on_a_gpu_is_a_record_and_the_cache_is_given_back(calls, monkeypatch):
    def greedy(q, k, v):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")

    case = Case(
        kind="memory",
        backend="greedy",
        label="greedy",
        num_heads=1,
        head_dim=8,
        tokens=4,
        dtype="float32",
        device="cuda",
        threads=1,
    )
    # The tensors stay on the CPU: where they lie is not the question here.
    move = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *args, device=None, **more: move(x, *args, **more))
    record = worker.measure(case, target=greedy)
    assert record.status == "oom" and "Tried to allocate 3 GiB" in record.reason
    assert calls[-1] == "empty the cache"
