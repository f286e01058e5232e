"""The engine: no failure stops a study, nothing measured is lost, a resumed study decides as before."""

import random
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from engine_runs import ROUNDS, in_turn, points, run
from study_points import study

import efficient_attn as ea
from efficient_attn.measure import worker
from efficient_attn.measure.isolation import Process
from efficient_attn.measure.record import Record, read
from efficient_attn.measure.variants import UNIFORM_ATTENTION, Variant
from efficient_attn.runs.engine import Engine, foreseen
from efficient_attn.runs.progress import Durations
from efficient_attn.runs.store import OVER_BUDGET, Store
from efficient_attn.runs.study import Point
from efficient_attn.stats.estimates import curves
from efficient_attn.stats.speeds import speed_ups


def measured(case, *, times_s=(0.5,), target=None, seconds=0.0):
    if case.kind == "time":
        return Record(case=case, times_s=times_s, round_sizes=(1,))
    return Record(case=case, peak_bytes=1)


def remembered(seen):
    """A measurement that appends every case to a list."""

    def measure(case, **settings):
        seen.append(case)
        return measured(case)

    return measure


def entries(*labels, lengths=(16, 32), growth=1, measure=measured, **more):
    variants = [
        Variant(backend=label, label=label, target=label, time_growth=growth, memory_growth=growth)
        for label in labels
    ]
    return points(variants, lengths, measure, **more)


class Clock:
    """A clock on which every call of attention takes so many seconds and nothing else takes any."""

    call_s, now_s, longest_s = None, 0.0, 0.0

    def monotonic(self):
        return self.now_s

    def measure(self, case, *, target=None, seconds=0.1):
        """Calls until `seconds` are full, or one."""
        call_s = self.call_s(case)
        turn_s = max(seconds, call_s)
        self.now_s += turn_s
        self.longest_s = max(self.longest_s, turn_s)
        return measured(case, times_s=(call_s,))


@pytest.fixture
def clock(monkeypatch):
    """The clock of the engine; a test sets the seconds of a call."""
    clock = Clock()
    monkeypatch.setattr("efficient_attn.runs.engine.time", clock)
    return clock


def test_every_case_becomes_one_record_and_times_have_all_rounds():
    planned, steps = entries("a", "b"), []
    complete, records = run(planned, progress=steps.append)
    assert complete and {record.case for record in records} == {p.case for group in planned for p in group}
    assert [step.done for step in steps] == list(range(1, len(records) + 1)) == list(range(1, 9))
    assert steps[-1].total == 8 and steps[-1].range_s == (0, 0)
    assert all(len(record.times_s) == ROUNDS for record in records if record.case.kind == "time")


def test_the_backends_of_a_length_take_turns():
    seen = []
    run(entries("a", "b", kinds=("time",), measure=remembered(seen)))
    order = [(case.label, case.tokens) for case in seen[: 2 * ROUNDS]]
    assert order == [(label, 16) for label in "baabbaab"]


def test_rounds_before_a_failure_count_for_nothing():
    (times,) = entries("a", lengths=(16,), kinds=("time",))
    failed = Record(case=times[0].case, status="crash", reason="why", times_s=(1.0,), round_sizes=(1,))
    assert Store(rows=[failed]).rounds(failed.case) == 0


def test_a_failed_point_is_a_record_and_takes_no_further_turns():
    calls = []

    def measure(case, **settings):
        calls.append(case.label)
        if case.label == "bad":
            return Record(case=case, status="error", reason="it broke")
        return measured(case)

    _, records = run(entries("bad", "good", lengths=(16,), measure=measure))
    assert [record.status for record in records if record.case.label == "bad"] == ["error", "error"]
    assert [record.status for record in records if record.case.label == "good"] == ["ok", "ok"]
    assert calls.count("bad") == 2 and calls.count("good") == ROUNDS + 1


@pytest.mark.parametrize("kind", ["time", "memory"])
def test_whatever_a_study_raises_at_a_point_is_the_record_of_the_point(kind):
    def broken(case, **settings):
        raise ValueError("it broke") if case.label == "bad" else ea.UnsupportedError("Not this one.")

    _, records = run(entries("bad", "refused", lengths=(16,), kinds=(kind,), measure=broken))
    outcomes = [(record.status, record.reason.partition(" (")[0]) for record in records]
    assert {*outcomes} == {("error", "ValueError: it broke"), ("unsupported", "Not this one.")}


@pytest.mark.parametrize("calls", [1, 2, 5, 9, 20])
def test_a_run_interrupted_anywhere_and_resumed_measures_the_rest_alone(tmp_path, calls):
    path, seen, begun = tmp_path / "records.jsonl", [], []

    def interrupted(case, **settings):
        begun.append(case)
        if len(begun) == calls:
            raise KeyboardInterrupt
        return measured(case)

    run(entries("a", "b", measure=interrupted), store=Store(path))
    rows = read(path).records if path.exists() else ()
    assert len(rows) == calls - 1
    complete, records = run(entries("a", "b", measure=remembered(seen)), store=Store(path, rows))
    assert complete and len(seen) == 2 * 2 * (ROUNDS + 1) - (calls - 1)
    whole = run(entries("a", "b"))[1]
    assert {record.case.key: record for record in records} == {record.case.key: record for record in whole}


def test_a_study_decides_by_records_and_a_resumed_one_decides_the_same(tmp_path):
    """A search for the shortest length at which b is faster, by an `if`."""
    path, seen = tmp_path / "records.jsonl", []

    def measure(case, *, target, seconds):
        seen.append(case.tokens)
        times_s = 1.0 if case.label == "a" else 40.0 / case.tokens
        return Record(case=case, times_s=(times_s,), round_sizes=(1,))

    def steps():
        for times in entries("a", "b", lengths=(16, 32, 64, 128), kinds=("time",), measure=measure):
            slow, fast = yield times
            if slow.times_s and min(fast.times_s) < min(slow.times_s):
                return

    assert Engine(steps, Store(path)).run()
    assert {*seen} == {16, 32, 64}
    seen.clear()
    store = Store(path, read(path).records)
    engine = Engine(steps, store)
    assert engine.to_measure == 0 and engine.run() and not seen


def test_a_study_may_ask_for_more_rounds_of_the_same_calls():
    (times,) = entries("a", "b", lengths=(16,), kinds=("time",))
    first = [Point(**{**vars(point), "rounds": 1}) for point in times]
    plan, shown = in_turn([first, times]), []
    assert [point.rounds for point in foreseen(plan(), Store()).values()] == [ROUNDS, ROUNDS]
    assert Engine(plan, Store(), report=shown.append).run()
    assert [(step.done, step.total) for step in shown] == [(0, 2), (0, 2), (1, 2), (2, 2)]


def test_a_budget_that_is_too_short_for_a_comparison_ends_the_run_with_the_least_it_needs(clock):
    clock.call_s = lambda case: 20.0
    # Uniform attention is no candidate.
    labels = ("a", UNIFORM_ATTENTION, "b")
    lists = entries(*labels, lengths=(16, 32), kinds=("memory",), measure=clock.measure)
    store = Store()
    engine = Engine(in_turn(lists), store, budget_s=15)
    assert engine.run() and [record.case.label for record in store.records.values()] == ["a"]
    # Of 15 s 4.5 are for the page.
    needed = "use --budget 45s or more."
    assert engine.too_short == f"A budget of 15 s is too short for a baseline and one candidate; {needed}"
    for budget_s, notes in ((47, 1), (80, 0)):
        engine = Engine(in_turn(lists), Store(), budget_s=budget_s)
        assert engine.run() and bool(engine.too_short) == notes


def test_a_resumed_run_tries_what_the_budget_skipped_if_it_has_another_budget():
    (times,) = entries("a", lengths=(16,), kinds=("time",))
    skipped = Record(case=times[0].case, status="skipped", reason=f"would take long {OVER_BUDGET}")
    _, (kept,) = run([times], store=Store(rows=[skipped]))
    _, (again,) = run([times], store=Store(rows=[skipped], retry_over_budget=True))
    assert kept == skipped and again.status == "ok"


def test_a_budget_knows_the_seconds_of_compiling_once_a_point_was_compiled(clock, monkeypatch):
    clock.call_s = lambda case: 0.01
    monkeypatch.setattr("efficient_attn.runs.engine._SAVING_S", 0.0)

    def measure(case, *, target, seconds=0.1):
        clock.now_s += 10
        return clock.measure(case, target=target, seconds=seconds)

    variant = Variant(backend="a", label="a", target="a", execution="compiled")
    planned = points([variant], (16, 17), measure, kinds=("time",))
    _, (first, second) = run(planned, budget_s=45)
    assert len(first.times_s) == ROUNDS and second.status == "skipped"
    assert "needs 10.1 s, 4.8 s of the budget" in second.reason


@pytest.mark.parametrize("exponent", [0, 4])
def test_measuring_ends_within_its_budget_however_much_slower_backends_become(clock, exponent):
    """But for the one turn that is under way; and it is made use of where there is more to measure."""
    clock.call_s = lambda case: 1e-3 * (case.tokens / 16) ** exponent
    lengths = [16 * 2**power for power in range(8)]
    planned, steps = entries(*"abcdef", lengths=lengths, growth=min(exponent, 2), measure=clock.measure), []
    _, records = run(planned, progress=steps.append, budget_s=60)
    assert clock.now_s <= 60 + clock.longest_s and len(records) == sum(map(len, planned))
    assert all(step.range_s[1] <= 60 for step in steps)
    assert exponent < 4 or clock.now_s > 60 / 2


def test_rounds_that_no_longer_fit_are_not_taken_and_every_backend_has_one(clock):
    clock.call_s = lambda case: 10.0
    planned = entries("a", "b", lengths=(16,), kinds=("time",), measure=clock.measure)
    _, records = run(planned, budget_s=31)
    assert clock.now_s <= 31
    assert {record.case.label: len(record.times_s or ()) for record in records} == {"a": 1, "b": 1}


def test_a_point_is_tried_once_even_if_it_is_expected_to_take_longer_than_the_timeout(clock):
    clock.call_s = lambda case: 1.0
    planned = entries("a", lengths=(16, 64), growth=2, kinds=("time",), measure=clock.measure)
    _, records = run(planned, timeout_s=5)
    assert [len(record.times_s) for record in records] == [ROUNDS, ROUNDS]


def test_times_of_bench_have_their_baseline_in_all_rounds_used_and_end_with_the_budget(clock, monkeypatch):
    def drawn_s(case):
        base_s = draws.setdefault(case.label, 10 ** draw.uniform(-4, -1))
        return base_s * (case.tokens / 256) ** (2 if case.label == "exact" else 1) * draw.uniform(0.7, 1.4)

    clock.call_s = drawn_s
    monkeypatch.setattr(worker, "measure", lambda case, *, seconds, **_: clock.measure(case, seconds=seconds))
    for seed in range(50):
        draw, draws, clock.now_s, clock.longest_s = random.Random(seed), {}, 0.0, 0.0
        labels = draw.sample(("window", "linformer", "performer-positive", "linear-relu"), draw.randint(1, 4))
        lengths = [256 << step for step in range(draw.randint(1, 5))]
        budget_s, store = 10 ** draw.uniform(0.7, 2.5), Store()
        plan = study("bench", labels, seq_lens=lengths, num_heads=2, threads=1, isolate="none")
        Engine(plan.points, store, budget_s=budget_s, start_s=0.0).run()
        assert clock.now_s <= 1.15 * budget_s + clock.longest_s
        times = {(x.case.label, x.case.tokens): x for x in store.records.values() if x.times_s}
        assert all(x.round_numbers == tuple(range(len(x.times_s))) for x in times.values())
        for row in speed_ups(curves(times.values(), "time_s")):
            for tokens, speed in row.ratios.items():
                rounds = zip(times["exact", tokens].times_s, times[row.label, tokens].times_s, strict=False)
                ratios = [exact_s / time_s for exact_s, time_s in rounds][: speed.samples]
                assert len(ratios) == speed.samples and min(ratios) <= speed.median <= max(ratios)


def test_the_process_that_measures_starts_before_the_first_point(monkeypatch):
    started = []
    monkeypatch.setattr(Process, "start", lambda process: started.append(process))
    for isolate in ("none", "reuse"):
        plan = study("bench", ["window"], seq_lens=16, num_heads=2, threads=1, isolate=isolate)
        with plan.resources():
            assert len(started) == (isolate == "reuse")


class Queue:
    """An executor that measures a point when its result is asked for."""

    def __init__(self, failures=None):
        self.futures, self.failures = [], failures or {}

    def submit(self, measure):
        future, number = Future(), len(self.futures)

        def result():
            if number in self.failures:
                raise self.failures[number]
            return measure()

        future.result = result
        self.futures.append(future)
        return future


def mse(**more):
    settings = {"inputs": "gaussian", "seq_lens": 24, "head_dim": 4, "sizes": (4, 8), "draws": 2}
    return ea.mse(["window", "performer-positive"], **settings, threads=1, **more)


def test_an_executor_gets_all_points_at_once_and_gives_the_records_of_one_process():
    queue = Queue()
    assert mse(executor=queue).records == mse().records and len(queue.futures) == len(mse())


@pytest.mark.slow
def test_processes_measure_as_this_one():
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes:
        assert mse(executor=processes).records == mse().records


def test_an_executor_that_accepts_no_points_is_refused():
    processes = ProcessPoolExecutor(1)
    processes.shutdown()
    with pytest.raises(ea.OptionError, match="accepts no points: RuntimeError: cannot schedule"):
        mse(executor=processes)


def test_a_run_too_short_for_a_comparison_raises_its_records_and_folder(tmp_path, undrawn):
    with pytest.raises(ea.IncompleteError, match="is too short for a baseline and one candidate") as caught:
        mse(budget_s=1e-6, out=tmp_path)
    assert (caught.value.folder, caught.value.records) == (tmp_path, ())


def test_a_failure_of_the_executor_is_a_record_and_resumed(tmp_path, undrawn):
    first = mse(executor=Queue({1: RuntimeError("the node was lost")}), out=tmp_path)
    assert [one.status for one in first.records] == ["ok", "error", *["ok"] * (len(first) - 2)]
    assert first.records[1].reason.startswith("the executor failed: RuntimeError: the node was lost")
    queue = Queue()
    assert {*mse(executor=queue, out=tmp_path, resume=True).records} == {*mse().records}
    assert len(queue.futures) == 1


def test_an_interruption_keeps_records_and_cancels_pending_points(tmp_path, undrawn):
    queue = Queue({2: KeyboardInterrupt()})
    results = mse(executor=queue, out=tmp_path)
    rows = (tmp_path / "records.jsonl").read_text().splitlines()
    assert results.interrupted and len(results) == len(rows) == 2
    assert all(future.cancelled() for future in queue.futures[2:])


def test_a_point_takes_as_long_as_its_series_and_not_as_others_of_its_kind():
    (memory, time), (_, other_time) = (
        [points[0] for points in entries(label, lengths=(16,), kinds=("memory", "time"))] for label in "ab"
    )
    durations = Durations(0.1)
    durations.learn(memory, Record(case=memory.case, peak_bytes=1), 1.0)
    durations.learn(other_time, Record(case=other_time.case, times_s=(9.0,)), 9.0)
    assert durations.next_s(time) == 3.0
