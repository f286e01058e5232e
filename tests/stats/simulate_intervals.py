"""Coverage of nominal 95 % intervals under noise that timings have, by simulation.

    cd tests && python -m stats.simulate_intervals 1000

prints the tables of results/simulations/intervals.md. Every simulated run becomes records, and its
intervals are those of tables and sentences.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from made_records import case

from efficient_attn.measure.record import Record
from efficient_attn.stats.estimates import Curve, curves, speed_ups
from efficient_attn.stats.predicted_time import crossover

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
        if not self.printed:
            return "none printed"
        share = self.held / self.printed
        standard_error = math.sqrt(share * (1 - share) / self.printed)
        return f"{100 * share:.1f} ± {100 * standard_error:.1f}"


def of_model(rounds: float = 0.0, correlation: float = 0.0, case_and_run: float = 0.0) -> Noise:
    """Effects of rounds or of the run on each backend at each length: [backends lengths rounds].

    Args:
        rounds: Standard deviation of what is common to the calls of a round.
        correlation: Of successive rounds.
        case_and_run: Standard deviation of what is common to the calls of one case in one run.
    """

    def effects(generator: np.random.Generator, count: int) -> np.ndarray:
        of_rounds = rounds * autoregression(generator, (2, len(LENGTHS), count), correlation)
        return of_rounds + case_and_run * generator.standard_normal((2, len(LENGTHS), 1))

    return effects


def autoregression(generator: np.random.Generator, shape: tuple[int, ...], value: float) -> np.ndarray:
    """Stationary series of variance 1 along the last axis."""
    noise = generator.standard_normal(shape)
    for place in range(1, shape[-1]):
        noise[..., place] = value * noise[..., place - 1] + math.sqrt(1 - value**2) * noise[..., place]
    return noise


def of_shared_rounds(generator: np.random.Generator, rounds: int) -> np.ndarray:
    """Effects of 20 % of the round, which all calls of both backends share."""
    return generator.normal(0, 0.2, (1, len(LENGTHS), rounds)).repeat(2, axis=0)


def one_sided(generator: np.random.Generator, rounds: int) -> np.ndarray:
    """Effects that only slow a round down, by 10 % in the mean; the truth is their median."""
    return generator.exponential(0.1, (2, len(LENGTHS), rounds)) - 0.1 * math.log(2)


MODELS: Mapping[str, Noise] = {
    "independent calls": of_model(),
    "effects of rounds, 20 %": of_model(rounds=0.2),
    "the same shared by backends, 20 %": of_shared_rounds,
    "autocorrelated rounds, 10 %, AR(1) 0.7": of_model(rounds=0.1, correlation=0.7),
    "rounds that are only slowed down, 10 %": one_sided,
}
RUN_SHIFTS = {
    f"shifts of a whole run, {share} %: against the truth over runs": of_model(case_and_run=share / 100)
    for share in (3, 5)
}


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


def time_coverage(noise: Noise, *, rounds: int, runs: int, seed: int = 0) -> dict[str, Coverage]:
    """How often the intervals of medians, ratios and crossovers hold the truth."""
    held: dict[str, list[bool]] = {"median": [], "speed": [], "crossover": []}
    for number in range(runs):
        both = curves(run(np.random.default_rng([seed, number]), noise, rounds), "time_s")
        for name, (low, true, high) in _intervals(both).items():
            held[name].append(low <= true <= high)
    return {name: Coverage(sum(inside), len(inside)) for name, inside in held.items()}


def _intervals(both: Sequence[Curve]) -> dict[str, tuple[float, float, float]]:
    """Lower end, truth and upper end of each interval that is printed."""
    # One length of one backend stands for all: medians of a run are independent of each other.
    point, (row,) = both[0].points[2], speed_ups(both)
    intervals = {}
    if point.low is not None:
        intervals["median"] = point.low, true_s(both[0].label, point.tokens), point.high
    if row.last.low is not None:
        true = true_s("exact", row.case.tokens) / true_s("window", row.case.tokens)
        intervals["speed"] = row.last.low, true, row.last.high
    tokens, low, high = crossover(row.ratios) if row.last.low is not None else (None,) * 3
    if tokens is not None and (low > LENGTHS[0] or high is not None):
        intervals["crossover"] = low, CROSSOVER, high or math.inf
    return intervals


def table(runs: int) -> str:
    """The coverage of all intervals in Markdown."""
    columns = ("median", "speed", "crossover")
    lines = [["noise", "rounds", *columns], ["---", "---:", *["---:"] * len(columns)]]
    for name, noise in (MODELS | RUN_SHIFTS).items():
        for rounds in (4, 10):
            coverage = time_coverage(noise, rounds=rounds, runs=runs)
            lines.append([name, str(rounds), *(str(coverage[column]) for column in columns)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table(int(sys.argv[1]) if len(sys.argv) > 1 else 1000))
