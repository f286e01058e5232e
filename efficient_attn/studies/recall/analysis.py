"""Records of recall as rows: accuracy of each backend over its seeds, and its error before training."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from efficient_attn.runner.records import Case, Record
from efficient_attn.runner.sizes import MEAN_OF_VALUES, Sized, sized
from efficient_attn.stats.curves import YARDSTICK
from efficient_attn.stats.median import FEWEST_FOR_95, Middle, middle
from efficient_attn.stats.significance import quantile

# On either side of an interval of 95 %.
_OUTSIDE = 0.025

# On either side of the accuracies of a control at chance: one alarm in a thousand is false.
_CONTROL_OUTSIDE = 0.0005
_NORMAL = 1e9

# Fields that are equal for all rows of a contest.
_SHARED = ("inputs", "tokens", "causal", "batch", "num_heads", "head_dim", "dtype", "device", "threads")

# Random weights whose quantiles are the edges of an interval.
_WEIGHTINGS, _SEED = 20_000, 0


class Accuracy(NamedTuple):
    """A share of right answers, the mean over seeds.

    Attributes:
        low: Lower edge of the 95 % interval for the mean over all seeds; None for fewer than six seeds.
        least: The accuracy of the worst seed; `most` is that of the best one.
    """

    mean: float
    low: float | None
    high: float | None
    least: float
    most: float

    @property
    def edges(self) -> tuple[float, float]:
        """The interval, or the range over seeds where there is none."""
        if self.low is None or self.high is None:
            return self.least, self.most
        return self.low, self.high


class Learned(NamedTuple):
    """One backend at one size, over all seeds.

    Attributes:
        case: Case of the first seed.
        accuracy: None if no training ended.
        answers: Number of answers of all seeds.
        step_s: Seconds of a training step.
        untrained: Relative output error against exact attention before training, mean over seeds.
        failed: Trainings without an accuracy.
    """

    case: Case
    accuracy: Accuracy | None
    answers: int
    seeds: int
    chance: float
    step_s: Middle | None
    untrained: float | None
    state_bytes: int | None
    floats_read: int | None
    failed: tuple[Record, ...]

    @property
    def label(self) -> str:
        return self.case.label

    @property
    def sized(self) -> Sized:
        """Label without the size, and the size."""
        return sized(self.case)

    @property
    def at_chance(self) -> bool:
        """Whether the accuracy does not differ significantly from chance."""
        if self.accuracy is None:
            return False
        low, high = wilson(self.accuracy.mean, self.answers, _CONTROL_OUTSIDE)
        return low <= self.chance <= high


class Contest(NamedTuple):
    """Backends that learned the same task in the same way."""

    case: Case
    rows: tuple[Learned, ...]

    @property
    def exact(self) -> Learned | None:
        """Exact attention."""
        return next((row for row in self.rows if row.case.backend == YARDSTICK and row.accuracy), None)

    @property
    def compared(self) -> tuple[Learned, ...]:
        """Rows that are ranked: trained, neither exact attention nor a control."""
        return tuple(
            row
            for row in self.rows
            if row.accuracy and row.case.backend != YARDSTICK and row not in self.controls
        )

    @property
    def controls(self) -> tuple[Learned, ...]:
        """Rows of backends that cannot see the pairs."""
        return tuple(r for r in self.rows if r.case.backend == MEAN_OF_VALUES or is_blind(r.case))


def contests(records: Iterable[Record]) -> tuple[Contest, ...]:
    """One contest per task and training configuration, its rows in descending order of accuracy."""
    latest = {record.case.key: record for record in records if record.case.kind == "recall"}
    settings: dict[tuple[object, ...], dict[str, list[Record]]] = {}
    for record in latest.values():
        setting = tuple(getattr(record.case, name) for name in _SHARED)
        settings.setdefault(setting, {}).setdefault(record.case.label, []).append(record)
    found = (sorted(map(_row, labelled.values()), key=_place) for labelled in settings.values())
    return tuple(Contest(rows[0].case, tuple(rows)) for rows in found)


def accuracy_of(shares: Sequence[float]) -> Accuracy:
    """The mean over seeds, with an interval for the mean over all seeds where there are six or more.

    A training may learn the task or fail, and three that learned do not exclude that one in two fails. So
    the interval is Gaffke's (2005), for any distribution between 0 and 1: quantiles of the mean of all seeds
    and one more, which got 0 or 1, under random weights that are uniform on the simplex. For seeds that all
    got 0 or 1 it is that of Clopper and Pearson.
    """
    low = high = None
    if len(shares) >= FEWEST_FOR_95:
        generator = np.random.default_rng(_SEED)
        weights = generator.dirichlet(np.ones(len(shares) + 1), size=_WEIGHTINGS)
        means = weights[:, 1:] @ np.asarray(shares)
        low = float(np.quantile(means, _OUTSIDE))
        high = float(np.quantile(means + weights[:, 0], 1 - _OUTSIDE))
    return Accuracy(fmean(shares), low, high, min(shares), max(shares))


def wilson(share: float, answers: int, outside: float = _OUTSIDE) -> tuple[float, float]:
    """Wilson's (1927) interval of a proportion, with the probability `outside` on either side."""
    z = quantile(outside, _NORMAL)
    middle_, reach = (
        share + z**2 / (2 * answers),
        z * math.sqrt(share * (1 - share) / answers + (z / 2 / answers) ** 2),
    )
    return (middle_ - reach) / (1 + z**2 / answers), (middle_ + reach) / (1 + z**2 / answers)


def is_blind(case: Case) -> bool:
    """Whether the backend is a window from which no query sees a pair: within the gap on either side."""
    gap = _number(case.inputs, "gap")
    window = case.options.get("window")
    if case.backend != "window" or gap is None or not isinstance(window, int):
        return False
    return (window - 1 if case.causal else window // 2) <= gap


def _number(inputs: str, name: str) -> int | None:
    """A number of the task, parsed from the inputs of a case."""
    items = dict(item.partition("=")[::2] for item in inputs.partition("(")[2].rstrip(")").split(", "))
    text = items.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else None


def _row(records: list[Record]) -> Learned:
    right = [r for r in records if r.status == "ok" and r.accuracy is not None and r.answers]
    times_s = [time_s for r in right for time_s in r.times_s or ()]
    errors = [r.output_relative_error for r in records if r.output_relative_error is not None]
    shares, answers = [r.accuracy or 0.0 for r in right], sum(r.answers or 0 for r in right)
    first = right[0] if right else records[0]
    return Learned(
        case=first.case,
        accuracy=accuracy_of(shares) if right else None,
        answers=answers,
        seeds=len(right),
        chance=first.chance or 0.0,
        step_s=middle(times_s) if times_s else None,
        untrained=fmean(errors) if errors else None,
        state_bytes=first.state_bytes,
        floats_read=first.floats_read,
        failed=tuple(r for r in records if r not in right),
    )


def _place(row: Learned) -> tuple[float, bool, str]:
    return -(row.accuracy.mean if row.accuracy else -1.0), row.case.backend != YARDSTICK, row.label
