"""Records of recall as rows: accuracy of each backend over its seeds, and its error before training."""

import math
import re
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.variants import UNIFORM_ATTENTION, YARDSTICK
from efficient_attn.stats.curves import grouped
from efficient_attn.stats.estimates import FEWEST_FOR_95, Middle, middle

# On either side of an interval of 95 %.
_OUTSIDE = 0.025

# Standard errors from chance within which a control is at chance: one alarm in a thousand is false.
_CONTROL_ERRORS = 3.29

# Fields that are equal for all rows of a contest.
_SHARED = ("inputs", "tokens", "causal", "batch", "num_heads", "head_dim", "dtype", "device", "threads")

# Random weights whose quantiles are the edges of an interval.
_WEIGHTINGS, _SEED = 20_000, 0


class Accuracy(NamedTuple):
    """A share of right answers, the mean over seeds.

    Attributes:
        low: Lower edge of the 95 % interval for the mean over all seeds, or the worst of fewer than six.
        high: Its upper edge, or the best of them.
    """

    mean: float
    low: float
    high: float


class Learned(NamedTuple):
    """One backend at one size, over all seeds.

    Attributes:
        first: Record of the first seed that was trained.
        accuracy: None if no training ended.
        answers: Number of answers of all seeds.
        step_s: Seconds of a training step.
        untrained: Relative output error against exact attention before training, mean over seeds.
        failed: Trainings without an accuracy.
    """

    first: Record
    accuracy: Accuracy | None
    answers: int
    seeds: int
    step_s: Middle | None
    untrained: float | None
    failed: tuple[Record, ...]

    @property
    def case(self) -> Case:
        return self.first.case

    @property
    def label(self) -> str:
        return self.case.label

    @property
    def chance(self) -> float:
        """Expected accuracy of a guess."""
        return self.first.chance or 0.0

    @property
    def at_chance(self) -> bool:
        """Whether the accuracy does not differ significantly from chance."""
        if self.accuracy is None:
            return False
        error = math.sqrt(self.chance * (1 - self.chance) / self.answers)
        return abs(self.accuracy.mean - self.chance) <= _CONTROL_ERRORS * error


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
        return tuple(r for r in self.rows if r.case.backend == UNIFORM_ATTENTION or is_blind(r.case))


def contests(records: Iterable[Record]) -> tuple[Contest, ...]:
    """One contest per task and training configuration, its rows in descending order of accuracy."""
    trained = (record for record in records if record.case.kind == "recall")
    found = [sorted(map(_row, grouped(group, "label")), key=_place) for group in grouped(trained, *_SHARED)]
    return tuple(Contest(rows[0].case, tuple(rows)) for rows in found)


def accuracy_of(shares: Sequence[float]) -> Accuracy:
    """The mean over seeds, with an interval for the mean over all seeds, or the range of fewer than six.

    A training may learn the task or fail, and three that learned do not exclude that one in two fails. So
    the interval is Gaffke's (2005), for any distribution between 0 and 1: quantiles of the mean of all seeds
    and one more, which got 0 or 1, under random weights that are uniform on the simplex. For seeds that all
    got 0 or 1 it is that of Clopper and Pearson.
    """
    low, high = min(shares), max(shares)
    if len(shares) >= FEWEST_FOR_95:
        generator = np.random.default_rng(_SEED)
        weights = generator.dirichlet(np.ones(len(shares) + 1), size=_WEIGHTINGS)
        means = weights[:, 1:] @ np.asarray(shares)
        low = float(np.quantile(means, _OUTSIDE))
        high = float(np.quantile(means + weights[:, 0], 1 - _OUTSIDE))
    return Accuracy(fmean(shares), low, high)


def is_blind(case: Case) -> bool:
    """Whether the backend is a window from which no query sees a pair: within the gap on either side."""
    gap, window = re.search(r"\bgap=(\d{1,9})\b", case.inputs), case.options.get("window")
    if case.backend != "window" or gap is None or not isinstance(window, int):
        return False
    return (window - 1 if case.causal else window // 2) <= int(gap[1])


def _row(records: list[Record]) -> Learned:
    right = [r for r in records if r.status == "ok" and r.accuracy is not None and r.answers]
    times_s = [time_s for r in right for time_s in r.times_s or ()]
    errors = [r.output_relative_error for r in records if r.output_relative_error is not None]
    return Learned(
        first=(right or records)[0],
        accuracy=accuracy_of([r.accuracy or 0.0 for r in right]) if right else None,
        answers=sum(r.answers or 0 for r in right),
        seeds=len(right),
        step_s=middle(times_s) if times_s else None,
        untrained=fmean(errors) if errors else None,
        failed=tuple(r for r in records if r not in right),
    )


def _place(row: Learned) -> tuple[float, bool, str]:
    return -(row.accuracy.mean if row.accuracy else -1.0), row.case.backend != YARDSTICK, row.label
