"""The clock: what a call takes, whatever else happens."""

import time

import pytest

from efficient_attn.measure.clock import clock, in_turns, sample, warm_up


class Scripted:
    """A clock that answers from a list."""

    def __init__(self, times_s):
        self.times_s = list(times_s)

    def __call__(self, call):
        return self.times_s.pop(0)


@pytest.mark.parametrize("milliseconds", [5, 20])
def test_a_call_that_spins_for_a_known_time_is_timed_within_2_percent(milliseconds):
    def spin():
        end = time.perf_counter() + milliseconds / 1000
        while time.perf_counter() < end:
            pass

    # The fastest of ten: the machine may take the processor away in some.
    assert min(clock("cpu")(spin) for _ in range(10)) == pytest.approx(milliseconds / 1000, rel=0.02)


def test_giving_the_result_back_is_not_part_of_the_time():
    class Slow:
        def __del__(self):
            time.sleep(0.05)

    assert min(clock("cpu")(Slow) for _ in range(3)) < 0.02


def test_warming_up_ends_when_two_calls_agree_or_the_limit_is_spent():
    steady = Scripted([9.0, 3.0, 1.0, 1.05, 7.0])
    assert warm_up(None, steady, limit_s=100) == 1.05 and steady.times_s == [7.0]
    endless = Scripted([3.0, 1.0, 3.0, 1.0, 3.0])
    assert warm_up(None, endless, limit_s=4) == 1.0 and endless.times_s == [3.0, 1.0, 3.0]


def test_samples_fill_the_time_within_their_least_and_most():
    assert sample(None, Scripted([5.0, 6.0]), seconds=1, least=2, most=9) == (5.0, 6.0)
    assert sample(None, Scripted([0.25] * 9), seconds=1, least=1, most=9) == (0.25,) * 4
    assert sample(None, Scripted([0.01] * 9), seconds=1, least=1, most=3) == (0.01,) * 3


def test_turns_go_forwards_and_backwards_so_that_a_drift_hits_all_alike_and_end_in_order():
    turns = in_turns(["a", "b", "c"], rounds=3)
    assert turns == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]
    assert in_turns(["a", "b"], rounds=2) == ["b", "a", "a", "b"]
    # A machine that slows down steadily: in an even number of turns all have the same mean.
    places = [i for i, name in enumerate(in_turns(["a", "b"], rounds=4)) if name == "a"]
    assert sum(places) / 4 == 3.5
