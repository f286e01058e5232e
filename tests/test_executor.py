"""Runs whose points are measured by an executor."""

from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

import efficient_attn as ea
from efficient_attn.errors import OptionError

pytestmark = pytest.mark.usefixtures("undrawn")

MSE = {"inputs": "gaussian", "seq_lens": 24, "head_dim": 4, "sizes": (4, 8), "draws": 2, "threads": 1}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Queue:
    """An executor that measures a point when its result is asked for."""

    def __init__(self, fail_at=None, failure=None):
        self.futures, self.failing = [], fail_at
        self.failure = failure or RuntimeError("the node was lost")

    def submit(self, measure):
        queue, number = self, len(self.futures)

        class Late(Future):
            def result(self, timeout=None):
                if number == queue.failing:
                    raise queue.failure
                self.set_result(measure())
                return super().result()

        self.futures.append(Late())
        return self.futures[-1]


def run(**more):
    return ea.mse(["window", "performer-positive"], **{**MSE, **more})


def test_an_executor_gets_all_points_at_once_and_gives_the_records_of_one_process():
    queue = Queue()
    assert run(executor=queue).records == run().records and len(queue.futures) == len(run())


@pytest.mark.slow
def test_processes_measure_as_this_one():
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes:
        assert run(executor=processes).records == run().records


def test_a_failure_of_the_executor_is_a_record_and_resumed():
    first = run(executor=Queue(fail_at=1), out="out")
    assert [one.status for one in first.records] == ["ok", "error", *["ok"] * (len(first) - 2)]
    assert first.records[1].reason == "the executor failed: RuntimeError: the node was lost"
    queue = Queue()
    assert {*run(executor=queue, out="out", resume=True).records} == {*run().records}
    assert len(queue.futures) == 1


def test_an_interruption_keeps_records_and_cancels_pending_points():
    queue = Queue(fail_at=2, failure=KeyboardInterrupt())
    results = run(executor=queue, out="out")
    assert results.interrupted and len(results) == 2 == len(
        Path("out/records.jsonl").read_text().splitlines()
    )
    assert all(future.cancelled() for future in queue.futures[2:])


@pytest.mark.parametrize(
    ("measure", "message"),
    [
        (lambda: run(executor=2), "executor needs a method submit, as of a ProcessPoolExecutor, unlike 2"),
        (
            lambda: ea.bench(["window"], seq_lens=16, executor=Queue()),
            "executor: the rounds of this run are interleaved in one process; leave it out.",
        ),
        (lambda: ea.advise(backends=["window"], executor=Queue()), "executor: the rounds of this run"),
    ],
)
def test_what_an_executor_cannot_measure_is_refused(measure, message):
    with pytest.raises(OptionError, match=message):
        measure()
