"""The path of a GPU without one: a stand-in for torch.cuda writes down which calls come in which order."""

from contextlib import contextmanager

import pytest
import torch
from eager_flex import eager_flex

from efficient_attn.measure import memory, worker
from efficient_attn.measure.record import Case
from efficient_attn.studies.workload import Workload, settle


@pytest.fixture
def calls(monkeypatch):
    """What was called on the stand-in, in order."""
    told = []

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

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda name: told.append(f"synchronise {name}"))
    monkeypatch.setattr(torch.cuda, "memory_stats", stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda name: told.append(f"reset {name}"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("empty the cache"))
    return told


def test_the_peak_is_taken_above_what_was_there_once_the_device_has_nothing_left_to_do(calls):
    peak = memory.peak(lambda: calls.append("call"), device="cuda:1")
    assert peak == (4096, 512, memory.CUDA_ALLOCATED)
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


def test_an_illegal_access_to_memory_is_a_record_although_it_ends_the_use_of_the_device(
    measured, monkeypatch
):
    def use(*args):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def broken(q, k, v):
        for name in ("synchronize", "empty_cache", "memory_stats", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, use)
        use()

    for target in (broken, lambda q, k, v: v.clone()):
        record = measured(target)
        assert record.status == "error" and "an illegal memory access" in record.reason


@pytest.mark.parametrize(
    ("backend", "sizes", "kernels"),
    [
        ("performer-positive", {}, "flex"),
        ("performer-positive", {"head_dim": 8}, "torch"),
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
    assert settle(Workload(device="cuda:1", dtype="float32")).dtype == "float32"
