"""Coverage and verdicts of speeds that are measured until they are decided, by simulation.

    python tests/helpers/simulate_speeds.py 200

prints the second table of results/simulations/intervals.md. A run has nine backends at eight lengths; the
noise of a ratio comes in equal parts from the backend and from exact attention, whose rounds all backends of
a length share. Rounds are added at each look to what is open, as `bench` does.
"""

import math
import sys
from collections import namedtuple
from itertools import product

import numpy as np
from simulate_intervals import autoregression
from synthetic_records import timed

from efficient_attn.measure.record import Record
from efficient_attn.stats.estimates import FASTER, OPEN, SAME, SLOWER
from efficient_attn.stats.speeds import LOOKS, decided

BACKENDS, LENGTHS = 9, 8

# Verdicts that are false at a true ratio.
FALSE = {1.0: {FASTER, SLOWER}, 1.05: {SLOWER}, 1.3: {SLOWER, SAME}}
NOISES = (0.05, 0.15, 0.4)
# Correlation of neighbouring rounds, and share of rounds of a call that take ten times as long.
MODELS = {"independent rounds": (0.0, 0.0), "AR(1) 0.7": (0.7, 0.0), "3 % of rounds take 10×": (0.0, 0.03)}


# Shares of the speeds of simulated runs.
Shares = namedtuple("Shares", "covered false open_after_eight open_at_the_end")


def noise(generator: np.random.Generator, count: int, deviation: float, correlation: float, spikes: float):
    """Logarithms of times, [count rounds]."""
    drawn = autoregression(generator, (count, LOOKS[-1]), correlation)
    return deviation * drawn + math.log(10) * (generator.random(drawn.shape) < spikes)


def outcomes(generator: np.random.Generator, ratio: float, *noise_model: float):
    """Speeds of one run at a true ratio, and the number of rounds of each."""
    deviation, *model = noise_model
    exact, backends = (
        noise(generator, count, deviation / math.sqrt(2), *model) for count in (LENGTHS, LENGTHS * BACKENDS)
    )
    rounds = np.full(len(backends), LOOKS[0])
    for look in (*LOOKS[1:], None):
        pairs = [record_pair(n, backends - math.log(ratio), exact, count) for n, count in enumerate(rounds)]
        speeds = decided(pairs)
        if look is not None:
            rounds[[speed.outcome == OPEN for speed in speeds]] = look
    return speeds, rounds


def record_pair(number: int, backends: np.ndarray, exact: np.ndarray, rounds: int) -> tuple[Record, Record]:
    """Records of a backend and of exact attention at its length, of the first rounds."""
    length = number // BACKENDS
    logs = {f"b{number % BACKENDS}": backends[number], "exact": exact[length]}
    return tuple(timed(label, 64 << length, np.exp(x[:rounds]).tolist()) for label, x in logs.items())


def shares(ratio: float, *noise_model: float, runs: int) -> Shares:
    """Shares of all speeds of some runs at a true ratio."""
    covered, false, eight, end = [], [], [], []
    for run in range(runs):
        speeds, rounds = outcomes(np.random.default_rng([1, run]), ratio, *noise_model)
        covered += [speed.low <= ratio <= speed.high for speed in speeds]
        false += [speed.outcome in FALSE[ratio] for speed in speeds]
        end += [speed.outcome == OPEN for speed in speeds]
        eight += [count > 8 for count in rounds]
    return Shares(*(float(np.mean(values)) for values in (covered, false, eight, end)))


if __name__ == "__main__":
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    print("| rounds | noise | true speed | covered | false verdicts | open after 8 rounds | open after 32 |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for (name, model), deviation, ratio in product(MODELS.items(), NOISES, FALSE):
        cells = [f"{100 * share:.1f}" for share in shares(ratio, deviation, *model, runs=runs)]
        print("|", " | ".join([name, f"{100 * deviation:.0f} %", f"{ratio:g}", *cells]), "|", flush=True)
