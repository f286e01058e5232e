"""Running a plan: no failure stops it, nothing measured is lost."""

import signal

import pytest
import torch
from isolated_points import SHARED
from looped import ROUNDS, points, run

from efficient_attn.backends import list_backends
from efficient_attn.runner import worker
from efficient_attn.runner.records import Case, Record
from efficient_attn.runner.variants import Variant, select
from efficient_attn.studies.estimate import Estimate


def measured(case, *, target, seconds=0.0):
    return Record(case=case, times_s=(0.5,)) if case.kind == "time" else Record(case=case, peak_bytes=1)


def entries(*labels, lengths=(16, 32), growth=1, measure=measured, **more):
    variants = [
        Variant(backend=label, label=label, target=label, time_growth=growth, memory_growth=growth)
        for label in labels
    ]
    return points(variants, lengths, measure, **more)


def run_all(planned, **settings):
    records, steps = [], []
    complete = run(planned, emit=records.append, progress=steps.append, **settings)
    return complete, records, steps


def test_every_case_of_a_plan_becomes_one_record_and_times_have_all_turns():
    planned = entries("a", "b")
    complete, records, _ = run_all(planned)
    assert complete and {r.case.key for r in records} == {e.case.key for e in planned}
    assert len(records) == len(planned)
    assert all(len(r.times_s) == ROUNDS for r in records if r.case.kind == "time")


def test_the_backends_of_a_length_take_turns():
    order = []

    def measure(case, **settings):
        order.append(f"{case.label}{case.tokens}")
        return measured(case, target=None, seconds=0)

    run_all(entries("a", "b", kinds=("time",), measure=measure))
    assert order[: 2 * ROUNDS] == ["b16", "a16", "a16", "b16", "b16", "a16", "a16", "b16"]


def test_a_record_is_given_away_before_the_next_case_is_begun():
    seen = []

    def measure(case, **settings):
        seen.append(("measure", case.tokens))
        return Record(case=case, peak_bytes=1)

    planned = entries("a", kinds=("memory",), measure=measure)
    run(planned, emit=lambda r: seen.append(("emit", r.case.tokens)))
    assert seen == [("measure", 16), ("emit", 16), ("measure", 32), ("emit", 32)]


def test_a_failed_point_is_a_record_and_takes_no_further_turns():
    calls = []

    def measure(case, **settings):
        calls.append(case.label)
        if case.label == "bad":
            return Record(case=case, status="error", reason="it broke")
        return measured(case, target=None, seconds=0)

    _, records, _ = run_all(entries("bad", "good", lengths=(16,), measure=measure))
    assert [r.status for r in records if r.case.label == "bad"] == ["error", "error"]
    assert [r.status for r in records if r.case.label == "good"] == ["ok", "ok"]
    assert calls.count("bad") == 2 and calls.count("good") == ROUNDS + 1


def test_a_point_that_would_not_fit_is_never_tried():
    tried = []

    def measure(case, **settings):
        tried.append(case.tokens)
        return measured(case, target=None, seconds=0)

    planned = entries("dense", lengths=(16, 4096), growth=2, limit_bytes=2**20, measure=measure)
    _, records, _ = run_all(planned)
    assert set(tried) == {16}
    assert {r.status for r in records if r.case.tokens == 4096} == {"skipped"}


def test_an_interruption_keeps_what_was_measured_and_the_turns_that_were_begun():
    calls = []

    def measure(case, **settings):
        calls.append(case)
        # Three turns into the second length; at the first two backends had theirs and one call for memory.
        if len(calls) == 2 * (ROUNDS + 1) + 4:
            raise KeyboardInterrupt
        return measured(case, target=None, seconds=0)

    complete, records, _ = run_all(entries("a", "b", measure=measure))
    assert not complete
    found = {(r.case.label, r.case.tokens, r.case.kind): len(r.times_s or ()) for r in records}
    assert found[("a", 16, "time")] == ROUNDS
    assert found[("a", 32, "time")] == 2 and found[("b", 32, "time")] == 1
    assert len(found) == len(records) == 6


def test_the_budget_skips_lengths_that_would_not_fit_and_says_so():
    def measure(case, **settings):
        return Record(case=case, times_s=(case.tokens / 16,))

    planned = entries("a", lengths=(16, 1600), kinds=("time",), measure=measure)
    _, (short, long), _ = run_all(planned, budget_s=30)
    assert short.status == "ok" and long.status == "skipped"
    assert "would take about 20 min" in long.reason and "budget of 30 s" in long.reason


def test_a_budget_knows_the_seconds_of_compiling_once_a_point_was_compiled(monkeypatch):
    clock = Clock(lambda case: 0.01)
    monkeypatch.setattr("efficient_attn.studies.loop.time", clock)

    def measure(case, *, target, seconds=0.1):
        clock.now_s += 10
        return clock.measure(case, target=target, seconds=seconds)

    variant = Variant(backend="a", label="a", target="a", execution="compiled")
    planned = points([variant], (16, 17), measure, kinds=("time",))
    _, (first, second), _ = run_all(planned, budget_s=70)
    assert len(first.times_s) == ROUNDS and second.status == "skipped"
    # Four rounds of 10 s beside 0.09 s of a round without calls; calls of 0.1 s and two for the warm-up.
    assert f"would take about {4 * (10 + 0.09 + 0.1 + 0.02):.1f} s, 29.6 s of the budget" in second.reason
    eager = Estimate(round_s=0.1)
    eager.learn(planned[0], Record(case=planned[0].case, times_s=(0.01,)), 10.0)
    assert 40 < eager.seconds(planned[1]) < 42


def test_a_point_with_device_times_is_predicted_to_take_twice_as_long():
    known, cold = Estimate(round_s=0.1), {"kinds": ("time",), "lengths": (16,)}
    (one,), (other,) = entries("a", **cold), entries("a", l2="cold", **cold)
    assert known.seconds(other) - ROUNDS * 0.02 == pytest.approx(2 * (known.seconds(one) - ROUNDS * 0.02))


class Clock:
    """A clock on which every call of attention takes so many seconds and nothing else takes any."""

    def __init__(self, call_s):
        self.call_s, self.now_s, self.longest_s = call_s, 0.0, 0.0

    def monotonic(self):
        return self.now_s

    def measure(self, case, *, target, seconds=0.1):
        """Calls until `seconds` are full, or one."""
        call_s = self.call_s(case)
        turn_s = max(seconds, call_s)
        self.now_s += turn_s
        self.longest_s = max(self.longest_s, turn_s)
        return (
            Record(case=case, times_s=(call_s,)) if case.kind == "time" else Record(case=case, peak_bytes=1)
        )


@pytest.mark.parametrize("exponent", [0, 1, 2, 4])
def test_measuring_ends_within_its_budget_however_much_slower_backends_become(monkeypatch, exponent):
    """But for the one turn that is under way; and it is made use of where there is more to measure."""
    clock = Clock(lambda case: 1e-3 * (case.tokens / 16) ** exponent)
    monkeypatch.setattr("efficient_attn.studies.loop.time", clock)
    lengths = [16 * 2**power for power in range(8)]
    planned = entries(*"abcdef", lengths=lengths, growth=min(exponent, 2), measure=clock.measure)
    _, records, steps = run_all(planned, budget_s=60)
    assert clock.now_s <= 60 + clock.longest_s and len(records) == len(planned)
    assert all(step.remaining_s <= 60 for step in steps)
    assert exponent < 4 or clock.now_s > 60 / 2


def test_a_length_is_begun_with_as_many_backends_as_fit_and_these_have_all_turns(monkeypatch):
    clock = Clock(lambda case: 1.0)
    monkeypatch.setattr("efficient_attn.studies.loop.time", clock)
    _, records, _ = run_all(
        entries("a", "b", "c", lengths=(16, 17), kinds=("time",), measure=clock.measure), budget_s=30
    )
    first, second = (
        [len(r.times_s or ()) for r in records if r.case.tokens == tokens] for tokens in (16, 17)
    )
    # Twelve seconds are gone, and each needs twelve beside the little that a point costs anyway.
    assert first == [ROUNDS] * 3 and sorted(second) == [0, 0, ROUNDS]


def test_turns_that_no_longer_fit_are_not_taken(monkeypatch):
    clock = Clock(lambda case: 10.0)
    monkeypatch.setattr("efficient_attn.studies.loop.time", clock)
    _, records, _ = run_all(
        entries("a", "b", lengths=(16,), kinds=("time",), measure=clock.measure), budget_s=25
    )
    assert clock.now_s <= 25 and {r.case.label: len(r.times_s or ()) for r in records} == {"a": 1, "b": 1}


def test_remaining_time_knows_that_points_grow():
    linear, quadratic = (entries("a", lengths=(16, 64), growth=power, kinds=("time",)) for power in (1, 2))
    # Two calls to warm up and one that is timed, four or sixteen times as long as the fastest one seen.
    for (short, long), factor in ((linear, 4), (quadratic, 16)):
        estimate = Estimate(round_s=0.0)
        assert estimate.seconds(long) < 0.1
        estimate.learn(short, Record(case=short.case, times_s=(2.0, 1.0)), 3.0)
        assert estimate.seconds(long) == pytest.approx(ROUNDS * 3 * factor, abs=0.1)


def test_progress_counts_up_to_the_end():
    _, _, steps = run_all(entries("a", "b"))
    finished = [step.done for step in steps]
    assert finished == list(range(1, 9)) and steps[-1].total == 8 and steps[-1].remaining_s == 0


def case_of(kind, **changes):
    return Case(**{"kind": kind, "backend": "f", "label": "f", "tokens": 16, **SHARED, **changes})


def mean_of_values(q, k, v):
    return v.mean(dim=-2, keepdim=True).expand_as(v).contiguous()


def test_the_worker_times_and_weighs_a_function_of_three_tensors():
    timed = worker.measure(case_of("time"), target=mean_of_values, seconds=0.01)
    assert timed.status == "ok" and timed.times_s and all(t > 0 for t in timed.times_s)
    weighed = worker.measure(case_of("memory"), target=mean_of_values)
    # The output, and the mean that it repeats: 2 heads of 16 and of one token, 8 entries of 4 bytes.
    assert weighed.peak_bytes == (16 + 1) * 2 * 8 * 4 and weighed.parameter_bytes == 0


def test_forward_and_backward_hold_the_gradients_of_q_k_v():
    forward, both = (
        worker.measure(case_of("memory", backend="exact-dense", backward=backward, tokens=64))
        for backward in (False, True)
    )
    # Three gradients of 2 heads, 64 tokens, 8 entries, 4 bytes are alive at the end.
    assert both.peak_bytes >= forward.peak_bytes + 3 * 2 * 64 * 8 * 4


def test_a_causal_backend_tells_the_bytes_of_its_state():
    case = case_of("memory", backend="performer-positive", causal=True, options={"num_features": 32})
    assert worker.measure(case).state_bytes > 0
    assert worker.measure(case_of("memory", backend="exact")).state_bytes is None


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried …"), "oom"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB"), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("sizes do not match\nand more lines"), "error"),
        (ZeroDivisionError("x" * 10_000), "error"),
    ],
)
@pytest.mark.parametrize("kind", ["time", "memory"])
def test_whatever_a_backend_raises_becomes_a_record_with_a_short_reason(kind, failure, status):
    def broken(q, k, v):
        raise failure

    record = worker.measure(case_of(kind), target=broken)
    assert record.status == status and record.reason.startswith(type(failure).__name__)
    assert len(record.reason) <= 300 and "\n" not in record.reason


def test_a_real_allocation_that_is_refused_is_out_of_memory():
    def greedy(q, k, v):
        return torch.empty(1 << 60, dtype=torch.uint8)

    assert worker.measure(case_of("time"), target=greedy).status == "oom"


def test_what_a_backend_refuses_is_unsupported_in_its_own_words():
    record = worker.measure(case_of("time", backend="linformer", causal=True))
    assert record.status == "unsupported" and "cannot be causal" in record.reason


def test_an_interruption_is_no_failure_of_the_backend():
    def interrupted(q, k, v):
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        worker.measure(case_of("time"), target=interrupted)


def test_measuring_leaves_modules_threads_and_the_generator_as_they_were():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8))

        def forward(self, q, k, v):
            return v * self.weight

    scaled, threads, state = Scaled(), torch.get_num_threads(), torch.get_rng_state()
    record = worker.measure(case_of("time", dtype="bfloat16", threads=1), target=scaled, seconds=0.01)
    assert record.status == "ok"
    assert scaled.weight.dtype == torch.float32 and scaled.training
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)


def test_all_backends_are_measured_in_a_small_real_run(hasty):
    planned = points(select([name for name in list_backends() if name != "linformer"]), (16,), worker.measure)
    complete, records, _ = run_all(planned, budget_s=20)
    assert complete and {r.status for r in records} == {"ok"}
