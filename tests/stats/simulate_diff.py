"""The level and the power of `diff` under noise models.

    cd tests && python -m stats.simulate_diff

prints the tables of results/simulations/diff.md.

A comparison has 30 cases, or one, of 5 calls in each round. The level is the share of comparisons of equal
code that see a regression anywhere, the power the share that see one case 10 % slower.
"""

import math
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from made_records import case

from efficient_attn.measure.record import Record
from efficient_attn.stats.diff import compare_runs

CASES, ROUNDS, CALLS, CV = 30, 4, 5, 0.05

# Runs on each side, and rounds of a run.
MODES = ((1, 4), (1, 8), (3, 4))


class Model(NamedTuple):
    """Standard deviations of logarithms of time, of what is common to calls.

    Attributes:
        rounds: Common to a round of one case.
        correlation: Of successive rounds.
        run: Common to all cases of a run; `case_and_run` to one case of a run.
    """

    rounds: float = 0.0
    correlation: float = 0.0
    run: float = 0.0
    case_and_run: float = 0.0

    def effects(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """What the calls of each round have in common, [..., rounds]."""
        of_rounds = self.rounds * autoregression(generator, shape, self.correlation)
        of_case = self.case_and_run * generator.standard_normal((*shape[:-1], 1))
        return of_rounds + of_case + self.run * generator.standard_normal()


MODELS = {
    "independent calls": Model(),
    "rounds differ by 5 %": Model(rounds=0.05),
    "rounds differ by 10 %": Model(rounds=0.10),
    "rounds differ by 20 %": Model(rounds=0.20),
    "AR(1) 0.7 over rounds, 5 %": Model(rounds=0.05, correlation=0.7),
    "runs shift by 5 %": Model(run=0.05),
    "cases shift by 5 % in each run": Model(case_and_run=0.05),
}


def autoregression(generator: np.random.Generator, shape: tuple[int, ...], value: float) -> np.ndarray:
    """Stationary series of variance 1 along the last axis."""
    noise = generator.standard_normal(shape)
    for place in range(1, shape[-1]):
        noise[..., place] = value * noise[..., place - 1] + math.sqrt(1 - value**2) * noise[..., place]
    return noise


def run(
    generator: np.random.Generator,
    model: Model,
    *,
    cases: int = CASES,
    rounds: int = ROUNDS,
    slower: float = 1.0,
) -> list[Record]:
    """The records of one run; the first case is slower."""
    sizes = (CALLS,) * rounds
    effects = model.effects(generator, (cases, rounds))
    logs = CV * generator.standard_normal((cases, sum(sizes))) + np.repeat(effects, CALLS, axis=1)
    logs[0] += math.log(slower)
    return [
        Record(case=case("time", "b", 64 + number), times_s=tuple(1e-3 * np.exp(series)), round_sizes=sizes)
        for number, series in enumerate(logs)
    ]


def comparisons_of(model: Model, comparisons: int, *, runs: int = 1, slower: float = 1.0, **sizes: int):
    """One comparison after the other of `runs` runs on each side."""
    generator = np.random.default_rng(0)
    for _ in range(comparisons):
        old = [run(generator, model, **sizes) for _ in range(runs)]
        new = [run(generator, model, slower=slower, **sizes) for _ in range(runs)]
        yield compare_runs(old, new)


def level(model: Model, comparisons: int, **options: int) -> float:
    """Share of comparisons of equal code with a regression anywhere."""
    compared = comparisons_of(model, comparisons, **options)
    return sum(bool(comparison.of("regression")) for comparison in compared) / comparisons


def power(model: Model, comparisons: int, *, slower: float = 1.1, **options: int) -> float:
    """Share of comparisons in which the slower case is a regression."""
    compared = comparisons_of(model, comparisons, slower=slower, **options)
    return sum(comparison.changes[0].verdict == "regression" for comparison in compared) / comparisons


def standard_error(share: float, comparisons: int) -> float:
    """Of a binomial share."""
    return math.sqrt(share * (1 - share) / comparisons)


def table(measure: Callable[..., float], comparisons: int, cases: int) -> Iterator[str]:
    """The rows of a table: noise models by runs on each side and rounds."""
    modes = " | ".join(f"{runs} run{'s' * (runs > 1)}, {rounds} rounds" for runs, rounds in MODES)
    yield f"| noise | {modes} |"
    yield "|---" * (1 + len(MODES)) + "|"
    for name, model in MODELS.items():
        shares = (
            measure(model, comparisons, runs=runs, rounds=rounds, cases=cases) for runs, rounds in MODES
        )
        yield f"| {name} | " + " | ".join(f"{100 * share:.1f} %" for share in shares) + " |"


if __name__ == "__main__":
    whole = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    for title, measure, cases, comparisons in (
        (f"Level, {CASES} cases", level, CASES, whole),
        ("Power, 10 % in the only case", power, 1, 5 * whole),
        ("Level, one case", level, 1, 5 * whole),
        (f"Power, 10 % in one of {CASES} cases", power, CASES, whole),
    ):
        print(f"\n{title}, {comparisons} comparisons\n", flush=True)
        for row in table(measure, comparisons, cases):
            print(row, flush=True)
