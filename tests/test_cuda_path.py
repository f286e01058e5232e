"""The path of a GPU without one: a stand-in for torch.cuda writes down which calls come in which order."""

from contextlib import contextmanager

import pytest
import torch
from eager_flex import eager_flex

from efficient_attn.measure import memory, worker
from efficient_attn.measure.clock import clock
from efficient_attn.measure.isolation import Measurer
from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.records import line
from efficient_attn.studies.workload import Workload, settle


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


@pytest.fixture
def measured(calls, monkeypatch):
    """Records of cases of a GPU, whose tensors stay on the CPU: where they lie is not the question here."""
    move = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *args, device=None, **more: move(x, *args, **more))
    module = torch.nn.Module.to
    monkeypatch.setattr(torch.nn.Module, "to", lambda x, device=None, dtype=None: module(x, dtype=dtype))

    def measure(target, **sizes):
        name = target if isinstance(target, str) else "own"
        shape = {"num_heads": 2, "head_dim": 16, "tokens": 48, "dtype": "float32", "threads": 1, **sizes}
        case = Case(kind="memory", backend=name, label=name, device="cuda", **shape)
        return worker.measure(case, target=target)

    return measure


def test_out_of_memory_on_a_gpu_is_a_record_and_the_cache_is_given_back(calls, measured):
    def greedy(q, k, v):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")

    record = measured(greedy)
    assert record.status == "oom" and "Tried to allocate 3 GiB" in record.reason
    assert calls[-1] == "empty the cache"


@pytest.fixture
def broken(monkeypatch):
    """A function whose illegal access to memory ends the context: every later use of the device fails."""
    lost = []

    def use(*args):
        if lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def broken(q, k, v):
        lost.append(True)
        use()

    for name in ("synchronize", "empty_cache", "memory_stats", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, use)
    return broken


def test_an_illegal_access_to_memory_is_a_record_of_its_point(measured, broken):
    for target in (broken, lambda q, k, v: v.clone()):
        record = measured(target)
        assert record.status == "error" and "an illegal memory access" in record.reason


def test_a_process_that_had_an_error_is_asked_for_no_further_point():
    """After an illegal access to memory all its later calls fail."""

    class Child:
        is_running = lost = False

        def start(self):
            self.is_running = True

        def ask(self, job, request, *, limit_s):
            case = Case(**request["case"])
            self.lost = self.lost or case.tokens == 1
            if self.lost:
                return line(Record(case=case, status="error", reason="an illegal memory access")).encode()
            return line(Record(case=case)).encode()

        def close(self):
            self.is_running = self.lost = False

    shape = {"num_heads": 2, "head_dim": 16, "dtype": "float32", "threads": 1, "device": "cuda"}
    cases = [Case(kind="memory", backend="exact", label="exact", tokens=n, **shape) for n in (4, 1, 4, 1, 4)]
    with Measurer(timeout_s=10.0) as measurer:
        measurer._process = Child()
        assert [measurer(case).status for case in cases] == ["ok", "error"] * 2 + ["ok"]


@pytest.mark.parametrize(
    ("backend", "sizes", "kernels"),
    [
        ("performer-positive", {}, "flex"),
        ("performer-positive", {"causal": True}, "torch"),
        ("performer-positive", {"head_dim": 8}, "torch"),
        ("linear-elu", {}, "torch"),
        ("exact", {}, "torch"),
    ],
)
def test_a_record_names_the_kernels_that_ran(measured, backend, sizes, kernels):
    with eager_flex():
        assert measured(backend, **sizes).kernels == kernels


@pytest.mark.parametrize(("supported", "dtype"), [(True, "bfloat16"), (False, "float16")])
def test_the_dtype_of_a_gpu_is_one_that_it_multiplies_without_emulation(calls, monkeypatch, supported, dtype):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: supported or including_emulation
    )
    assert settle(Workload(device="cuda:1")).dtype == dtype
    assert calls == ["enter cuda:1", "leave cuda:1"]
    for name in ("bfloat16", "float32"):
        assert settle(Workload(device="cuda:1", dtype=name)).dtype == name
    assert settle(Workload(device="cpu")).dtype == "float32"
