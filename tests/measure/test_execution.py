"""Compiled and replayed calls: what is compiled, captured and refused."""

import itertools
from itertools import groupby
from unittest.mock import MagicMock

import pytest
import torch
from made_records import case
from planned import points_of

import efficient_attn as ea
from efficient_attn.backends import spec
from efficient_attn.errors import UnsupportedError
from efficient_attn.measure import calls
from efficient_attn.measure.calls import _executed
from efficient_attn.measure.record import COMPILED, CUDA_GRAPH, replace
from efficient_attn.registry import Capabilities
from efficient_attn.studies.bench import plan

EXACT = spec("exact")


@pytest.fixture
def compiled(monkeypatch):
    """Arguments of torch.compile, which leaves modules as they are."""
    arguments = []
    monkeypatch.setattr(torch, "compile", lambda module, **how: arguments.append((module, how)) or module)
    monkeypatch.setattr(torch.compiler, "reset", lambda: arguments.append("reset"))
    return arguments


@pytest.mark.parametrize("backward", [False, True])
def test_a_compiled_call_is_one_graph_of_the_measured_shapes_and_gives_the_same_results(compiled, backward):
    eager = case("time", "exact", 8, threads=1, backward=backward)
    prepared = calls.prepare(replace(eager, execution=COMPILED), "exact")
    assert compiled == ["reset", (prepared.module, {"fullgraph": True, "dynamic": False})]
    torch.testing.assert_close(prepared.call(), calls.prepare(eager, "exact").call())


def test_a_backend_that_does_not_promise_it_is_not_compiled(compiled):
    without = Capabilities(causal=False, compile=False)
    with pytest.raises(
        UnsupportedError, match=r"'exact' does not support torch\.compile; measure it eagerly"
    ):
        _executed(COMPILED, None, None, spec=replace(EXACT, capabilities=without), device="cpu")
    assert compiled == []


def test_a_graph_is_captured_after_calls_on_a_side_stream_and_then_replayed(monkeypatch):
    cuda = MagicMock()
    monkeypatch.setattr(torch, "cuda", cuda)
    call = _executed(CUDA_GRAPH, None, lambda module: cuda.attend, spec=EXACT, device="cuda:1")
    assert [name for name, *_ in cuda.mock_calls] == [
        *("device", "device().__enter__", "Stream", "current_stream", "Stream().wait_stream"),
        *("stream", "stream().__enter__", "attend", "attend", "attend", "stream().__exit__"),
        *("current_stream", "current_stream().wait_stream", "CUDAGraph"),
        *("graph", "graph().__enter__", "attend", "graph().__exit__", "device().__exit__"),
    ]
    cuda.device.assert_called_once_with("cuda:1")
    cuda.stream.assert_called_once_with(cuda.Stream())
    cuda.graph.assert_called_once_with(cuda.CUDAGraph())
    cuda.reset_mock()
    assert call() is cuda.attend.return_value
    assert [name for name, *_ in cuda.mock_calls] == ["CUDAGraph().replay"]


def test_on_a_gpu_times_have_a_cache(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    options = {"of": "attention,block", "execution": "eager,compiled", "error": False}
    planned = plan(["window"], seq_lens=(8, 16), device="cuda", dtype="bfloat16", **options)
    cases = [point.case for point in points_of(planned)]
    assert {(case.kind, case.execution, case.l2) for case in cases} == {
        *(("time", execution, "cold") for execution in (None, "compiled")),
        *(("memory", execution, None) for execution in (None, "compiled")),
    }
    assert {case.label for case in cases if case.execution == "compiled"} >= {"window · compiled"}
    # Points of one execution, which are compared, are one group; a budget is spent on eager calls first.
    groups = [group for group, _ in groupby((case.execution, case.tokens) for case in cases)]
    assert groups == list(itertools.product((None, "compiled"), (8, 16)))


@pytest.mark.compile
def test_bench_compiles_backends_on_a_cpu(monkeypatch):
    compile_ = torch.compile
    # The compiler of C++ is no part of this test.
    monkeypatch.setattr(torch, "compile", lambda module, **how: compile_(module, **how, backend="aot_eager"))
    both = {"execution": "eager,compiled", "of": "attention,block", "backward": True}
    small = {"seq_lens": 8, "num_heads": 2, "head_dim": 8, "threads": 1, "rounds": 1}
    results = ea.bench(["performer-positive"], isolate="none", error=False, **both, **small)
    assert {record.status for record in results.records} == {"ok"}
