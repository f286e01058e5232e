"""The clock: what a call takes, whatever else happens."""

import statistics
import time

import pytest

from efficient_attn.measure import worker
from efficient_attn.measure.clock import clock, sample, warm_up
from efficient_attn.measure.records import Case


class Scripted:
    """A clock that answers from a list."""

    def __init__(self, times_s):
        self.times_s = list(times_s)

    def __call__(self, call):
        return self.times_s.pop(0)


def sleeping(seconds):
    time.sleep(seconds)


def spinning(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def told_and_own(passing, seconds, measure):
    """The times that `measure` tells of calls of a function, and those that the function tells itself.

    A call ends late where the machine wakes it late, so it tells by another clock when it ended. What is
    left is the time between two readings of clocks; a machine that takes the processor away there hits
    single calls, and the median is one of those that it spared.
    """
    own_s = []

    def known(*tensors):
        start = time.clock_gettime(time.CLOCK_MONOTONIC_RAW)
        passing(seconds)
        own_s.append(time.clock_gettime(time.CLOCK_MONOTONIC_RAW) - start)
        return tensors[-1] if tensors else None

    times_s = measure(known)
    # The calls that were timed are the last ones; those before warmed up.
    own_s = own_s[-len(times_s) :]
    # Nothing sleeps or spins for less than it was told; how much longer is the machine's affair.
    assert min(times_s) >= seconds
    return statistics.median(time_s / own - 1 for time_s, own in zip(times_s, own_s, strict=True))


@pytest.mark.serial
@pytest.mark.parametrize("milliseconds", [5, 20, 100])
@pytest.mark.parametrize("passing", [sleeping, spinning])
def test_a_call_of_a_known_time_is_timed_within_2_percent(passing, milliseconds):
    def measure(known):
        return sample(known, clock("cpu"), seconds=0, least=5, most=5)

    assert 0 <= told_and_own(passing, milliseconds / 1000, measure) < 0.02


@pytest.mark.serial
def test_a_backend_of_a_known_time_is_timed_within_2_percent():
    """Through all layers: the checks of shapes before a backend is called are part of its time."""
    case = Case(
        kind="time",
        backend="own",
        label="own",
        num_heads=1,
        head_dim=4,
        tokens=4,
        dtype="float32",
        device="cpu",
        threads=1,
    )

    def measure(known):
        return worker.measure(case, target=known, seconds=0.5).times_s

    assert 0 <= told_and_own(sleeping, 0.1, measure) < 0.02


def test_giving_the_result_back_is_not_part_of_the_time():
    class Slow:
        def __del__(self):
            time.sleep(0.05)

    assert min(clock("cpu")(Slow) for _ in range(3)) < 0.02


def test_warming_up_ends_when_three_calls_agree_or_the_limit_is_spent():
    steady = Scripted([9.0, 3.0, 1.0, 1.05, 1.1, 7.0])
    assert warm_up(None, steady, limit_s=100) == 1.1 and steady.times_s == [7.0]
    endless = Scripted([3.0, 1.0, 3.0, 1.0, 3.0])
    assert warm_up(None, endless, limit_s=4) == 1.0 and endless.times_s == [3.0, 1.0, 3.0]
    # A call that still gets faster by 6 % each time is not warm, although two in a row agree.
    falling = Scripted([1.0 * 0.94**i for i in range(9)])
    warm_up(None, falling, limit_s=5)
    assert len(falling.times_s) == 9 - 6


def test_samples_fill_the_time_within_their_least_and_most():
    assert sample(None, Scripted([5.0, 6.0]), seconds=1, least=2, most=9) == (5.0, 6.0)
    assert sample(None, Scripted([0.25] * 9), seconds=1, least=1, most=9) == (0.25,) * 4
    assert sample(None, Scripted([0.01] * 9), seconds=1, least=1, most=3) == (0.01,) * 3
