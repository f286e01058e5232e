"""Coverage of nominal 95 % intervals under noise that timings have, by simulation.

    python tests/helpers/simulate_intervals.py 1000

prints the first table of results/simulations/intervals.md. Every simulated run becomes records with the
intervals of tables and sentences. A shift of a whole run is in the interval between two runs alone.
"""

import math
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from synthetic_records import case

from efficient_attn.measure.record import Record
from efficient_attn.stats.estimates import curves, time_ratio
from efficient_attn.stats.predicted_time import crossover
from efficient_attn.stats.speeds import speed_ups

LENGTHS = (256, 512, 1024, 2048, 4096)
CALLS = 9

# Exact attention takes n² and a part for every token, the backend so many tokens' worth for every token.
CROSSOVER, PER_TOKEN = 900, 300

# The scatter of single calls under every model.
OF_CALLS = 0.05

Noise = Callable[[np.random.Generator, int], np.ndarray]


class Coverage(NamedTuple):
    """How many intervals held the truth, of those that were printed."""

    held: int
    printed: int

    def __str__(self) -> str:
        share = self.held / self.printed
        standard_error = math.sqrt(share * (1 - share) / self.printed)
        return f"{100 * share:.1f} ± {100 * standard_error:.1f}"


def autoregression(generator: np.random.Generator, shape: tuple[int, ...], correlation: float) -> np.ndarray:
    """Series of standard deviation 1 along the last axis, in which neighbours have this correlation."""
    drawn = generator.standard_normal(shape)
    for place in range(1, shape[-1]):
        drawn[..., place] *= math.sqrt(1 - correlation**2)
        drawn[..., place] += correlation * drawn[..., place - 1]
    return drawn


def of_model(rounds: float = 0.0, correlation: float = 0.0, case_and_run: float = 0.0) -> Noise:
    """Effects on each backend at each length, [backends lengths rounds].

    Args:
        rounds: Standard deviation of what is common to the calls of a round.
        correlation: Of successive rounds.
        case_and_run: Standard deviation of what is common to the calls of one case in one run.
    """

    def effects(generator: np.random.Generator, count: int) -> np.ndarray:
        of_rounds = autoregression(generator, (2, len(LENGTHS), count), correlation)
        return rounds * of_rounds + case_and_run * generator.standard_normal((2, len(LENGTHS), 1))

    return effects


def of_shared_rounds(generator: np.random.Generator, rounds: int) -> np.ndarray:
    """Effects of 20 % of the round, which all calls of both backends share."""
    return generator.normal(0, 0.2, (1, len(LENGTHS), rounds)).repeat(2, axis=0)


def one_sided(generator: np.random.Generator, rounds: int) -> np.ndarray:
    """Effects that only slow a round down, by 10 % in the mean; the truth is their median."""
    return generator.exponential(0.1, (2, len(LENGTHS), rounds)) - 0.1 * math.log(2)


MODELS = {
    "independent calls": of_model(),
    "effects of rounds, 20 %": of_model(rounds=0.2),
    "the same shared by backends, 20 %": of_shared_rounds,
    "autocorrelated rounds, 10 %, AR(1) 0.7": of_model(rounds=0.1, correlation=0.7),
    "rounds that are only slowed down, 10 %": one_sided,
}
SHIFTS = {f"shifts of a whole run, {share} %": of_model(case_and_run=share / 100) for share in (3, 5)}


def run(generator: np.random.Generator, noise: Noise, rounds: int) -> list[Record]:
    """The records of one simulated run."""
    effects = noise(generator, rounds)
    records = []
    for at, tokens in enumerate(LENGTHS):
        for number, label in enumerate(("exact", "window")):
            calls = generator.normal(0, OF_CALLS, (rounds, CALLS)) + effects[number, at][:, None]
            times_s = tuple((true_s(label, tokens) * np.exp(calls)).ravel().tolist())
            sizes = (CALLS,) * rounds
            records.append(Record(case=case("time", label, tokens), times_s=times_s, round_sizes=sizes))
    return records


def true_s(label: str, tokens: int) -> float:
    """The median time of a call."""
    return 1e-9 * tokens * (PER_TOKEN + (tokens if label == "exact" else CROSSOVER))


def time_coverage(noise: Noise, *, rounds: int, runs: int) -> dict[str, Coverage]:
    """How often intervals of medians, speeds, crossovers and ratios between two runs hold the truth."""
    held: dict[str, list[bool]] = {"median": [], "speed": [], "crossover": [], "between runs": []}
    for number in range(runs):
        generator = np.random.default_rng([0, number])
        old, new = (run(generator, noise, rounds) for _ in range(2))
        both, ratio = curves(old, "time_s"), time_ratio(old[0], new[0], between_runs=True)
        held["between runs"].append(ratio.low <= 1 <= ratio.high)
        # One length of one backend stands for all: medians of a run are independent of each other.
        point, (row,) = both[0].points[2], speed_ups(both)
        if point.low is not None:
            held["median"].append(point.low <= true_s(both[0].label, point.tokens) <= point.high)
        if row.last.low is not None:
            true = true_s("exact", row.case.tokens) / true_s("window", row.case.tokens)
            held["speed"].append(row.last.low <= true <= row.last.high)
            tokens, low, high = crossover(row.ratios)
            if tokens is not None and (low > LENGTHS[0] or high is not None):
                held["crossover"].append(low <= CROSSOVER <= (high or math.inf))
    return {name: Coverage(sum(inside), len(inside)) for name, inside in held.items()}


if __name__ == "__main__":
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    print("| noise | rounds | median | speed | crossover | between two runs |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, noise in (MODELS | SHIFTS).items():
        for rounds in (4, 10):
            coverage = time_coverage(noise, rounds=rounds, runs=runs)
            print("|", " | ".join([name, str(rounds), *map(str, coverage.values())]), "|")
