"""Compiled and replayed calls: what is compiled, captured and refused."""

import itertools
from contextlib import contextmanager
from itertools import groupby

import pytest
import torch
from made_records import case
from planned import points_of

import efficient_attn as ea
from efficient_attn.backends import spec
from efficient_attn.errors import OptionError, UnsupportedError
from efficient_attn.measure import calls, worker
from efficient_attn.measure.calls import _executed
from efficient_attn.measure.record import COMPILED, CUDA_GRAPH
from efficient_attn.registry import Capabilities
from efficient_attn.studies.bench.plan import plan

SMALL = {"seq_lens": 8, "num_heads": 2, "head_dim": 8, "threads": 1, "rounds": 1}
SMALL |= {"isolate": "none", "error": False}
EXACT = spec("exact")


@pytest.fixture
def compiled(monkeypatch):
    """What torch.compile was given; modules stay as they are."""
    given = []
    monkeypatch.setattr(torch, "compile", lambda module, **how: given.append((module, how)) or module)
    monkeypatch.setattr(torch.compiler, "reset", lambda: given.append("reset"))
    return given


@pytest.fixture
def stream(monkeypatch):
    """What was called on a stand-in for streams and graphs, in order."""
    told = []

    class Stream:
        def __init__(self, name="side"):
            self.name = name

        def wait_stream(self, other):
            told.append(f"{self.name} waits for {other.name}")

    class Graph:
        def replay(self):
            told.append("replay")

    @contextmanager
    def within(name):
        told.append(f"enter {name}")
        yield
        told.append(f"leave {name}")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("main"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "device", within)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: within(stream.name))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: within("capture"))
    return told


@pytest.mark.parametrize("backward", [False, True])
def test_a_compiled_call_is_one_graph_of_the_measured_shapes_and_gives_the_same_results(compiled, backward):
    one = case("time", "exact", 8, threads=1, backward=backward)
    prepared = calls.prepare(worker.replace(one, execution=COMPILED), "exact")
    assert compiled == ["reset", (prepared.module, {"fullgraph": True, "dynamic": False})]
    torch.testing.assert_close(prepared.call(), calls.prepare(one, "exact").call())


def test_every_backend_is_measured_as_it_is_and_compiled_on_its_own_line(compiled):
    results = ea.bench(["window"], execution="eager,compiled", **SMALL)
    labels = {(one.case.label, one.case.execution, one.case.kind) for one in results.records}
    assert labels == {
        (f"{name}{mark}", execution, kind)
        for name in ("exact", "window")
        for mark, execution in (("", None), (" · compiled", "compiled"))
        for kind in ("time", "memory")
    }
    assert {one.status for one in results.records} == {"ok"}


def test_a_compiler_that_fails_is_a_record_with_the_reason(monkeypatch):
    def refusing(module, **how):
        raise RuntimeError("graph break in user code")

    monkeypatch.setattr(torch, "compile", refusing)
    record = worker.measure(case("time", "exact", 8, threads=1, execution=COMPILED))
    assert record.status == "error" and "graph break in user code" in record.reason


def test_a_backend_that_does_not_promise_it_is_not_compiled(compiled):
    without = Capabilities(causal=False, compile=False)
    with pytest.raises(
        UnsupportedError, match=r"'exact' does not support torch\.compile; measure it eagerly"
    ):
        _executed(COMPILED, None, None, spec=worker.replace(EXACT, capabilities=without), device="cpu")
    assert compiled == []


def test_a_graph_is_captured_after_calls_on_a_side_stream_and_then_replayed(stream):
    def called(module):
        return lambda: stream.append("call") or torch.ones(2)

    call = _executed(CUDA_GRAPH, None, called, spec=EXACT, device="cuda:1")
    assert stream == [
        "enter cuda:1",
        "side waits for main",
        "enter side",
        *["call"] * 3,
        "leave side",
        "main waits for side",
        "enter capture",
        "call",
        "leave capture",
        "leave cuda:1",
    ]
    stream.clear()
    assert call().tolist() == [1, 1] and stream == ["replay"]


def test_options_of_a_gpu_are_refused_on_a_cpu_and_unknown_caches_everywhere():
    with pytest.raises(UnsupportedError, match=r"cuda-graph needs a CUDA device; device is 'cpu'"):
        plan(execution="cuda-graph", device="cpu")
    with pytest.raises(UnsupportedError, match="l2 needs a CUDA device"):
        plan(l2="cold", device="cpu")
    with pytest.raises(OptionError, match="l2 is cold or warm, not 'hot'"):
        plan(l2="hot", device="cpu")


def test_on_a_gpu_times_have_a_cache_and_graphs_no_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    for given, l2 in ((None, "cold"), ("warm", "warm")):
        options = {"of": "attention,block", "execution": "eager,cuda-graph,compiled", "error": False}
        options["l2"] = given
        made = plan(["window"], seq_lens=(8, 16), device="cuda", dtype="bfloat16", **options)
        cases = [point.case for point in points_of(made)]
        assert {(one.kind, one.execution, one.l2) for one in cases} == {
            *(("time", execution, l2) for execution in (None, "compiled", "cuda-graph")),
            *(("memory", execution, None) for execution in (None, "compiled")),
        }
        # Points of one execution, which are compared, are one group; a budget is spent on eager calls first.
        groups = [group for group, _ in groupby((one.execution, one.tokens) for one in cases)]
        assert groups == list(itertools.product((None, "cuda-graph", "compiled"), (8, 16)))


@pytest.mark.compile
def test_bench_compiles_backends_on_a_cpu(monkeypatch):
    compile_ = torch.compile
    # The compiler of C++ is no part of this test.
    monkeypatch.setattr(torch, "compile", lambda module, **how: compile_(module, **how, backend="aot_eager"))
    both = {"execution": "eager,compiled", "of": "attention,block"}
    results = ea.bench(["performer-positive"], backward=True, **both, **SMALL)
    assert {one.status for one in results.records} == {"ok"}
