"""Records of recall as rows: what each backend learned over its seeds, and what it began with."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from efficient_attn.analysis.curves import YARDSTICK
from efficient_attn.analysis.significance import quantile
from efficient_attn.analysis.statistics import Middle, middle
from efficient_attn.sweep.records import Case, Record
from efficient_attn.sweep.sizes import MEAN_OF_VALUES, Sized, sized

# Of a normal distribution or of Student's t, on either side of an interval of 95 %.
_OUTSIDE = 0.025
_NORMAL = 1e9


class Accuracy(NamedTuple):
    """A share of right answers with its interval of 95 %."""

    mean: float
    low: float
    high: float


class Learned(NamedTuple):
    """One backend at one size, over all seeds.

    Attributes:
        case: Of its first seed.
        accuracy: None where no training ended.
        step_s: Seconds of a training step.
        untrained: Relative output error against exact attention before training, mean over seeds.
        failed: Trainings without an accuracy.
    """

    case: Case
    accuracy: Accuracy | None
    seeds: int
    chance: float
    step_s: Middle | None
    untrained: float | None
    state_bytes: int | None
    numbers_read: int | None
    failed: tuple[Record, ...]

    @property
    def label(self) -> str:
        return self.case.label

    @property
    def sized(self) -> Sized:
        """Its label without the size, and the size."""
        return sized(self.case)

    @property
    def at_chance(self) -> bool:
        """Whether the interval holds what a guess gets."""
        return self.accuracy is not None and self.accuracy.low <= self.chance <= self.accuracy.high


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
        """All that tell something by their place: with an accuracy, no exact attention, no control."""
        return tuple(
            row
            for row in self.rows
            if row.accuracy
            and row.untrained is not None
            and row.case.backend not in (YARDSTICK, MEAN_OF_VALUES)
            and not is_blind(row.case)
        )

    @property
    def controls(self) -> tuple[Learned, ...]:
        """What can know nothing of the pairs."""
        return tuple(r for r in self.rows if r.case.backend == MEAN_OF_VALUES or is_blind(r.case))


def contests(records: Iterable[Record]) -> tuple[Contest, ...]:
    """One for each task and way to train, the rows in order of their accuracy, the highest first."""
    latest = {record.case.key: record for record in records if record.case.kind == "recall"}
    settings: dict[tuple[object, ...], dict[str, list[Record]]] = {}
    for record in latest.values():
        settings.setdefault(_setting(record.case), {}).setdefault(record.case.label, []).append(record)
    found = []
    for labelled in settings.values():
        rows = sorted(map(_row, labelled.values()), key=_place)
        found.append(Contest(rows[0].case, tuple(rows)))
    return tuple(found)


def accuracy_of(shares: Sequence[float], answers: int) -> Accuracy:
    """The mean over seeds, with an interval for what another seed's weights and sequences would give.

    Either end is the farther one of two intervals: Student's over the seeds, which holds all that differs
    between them, and Wilson's (1927) over all answers together, since a few seeds may agree by chance.
    """
    mean = fmean(shares)
    low, high = wilson(mean, answers)
    if len(shares) > 1:
        spread = math.sqrt(sum((one - mean) ** 2 for one in shares) / (len(shares) - 1))
        reach = quantile(_OUTSIDE, len(shares) - 1) * spread / math.sqrt(len(shares))
        low, high = min(low, mean - reach), max(high, mean + reach)
    return Accuracy(mean, max(low, 0.0), min(high, 1.0))


def wilson(share: float, answers: int) -> tuple[float, float]:
    """The shares of which so many answers do not differ by more than 1.96 standard errors (Wilson 1927)."""
    z = quantile(_OUTSIDE, _NORMAL)
    middle_, reach = (
        share + z**2 / (2 * answers),
        z * math.sqrt(share * (1 - share) / answers + (z / 2 / answers) ** 2),
    )
    return (middle_ - reach) / (1 + z**2 / answers), (middle_ + reach) / (1 + z**2 / answers)


def agreement(rows: Sequence[Learned]) -> float | None:
    """Kendall's τ-b of less error before training with more accuracy after it: 1 where both orders agree."""
    pairs = [
        (
            _sign((other.untrained or 0) - (one.untrained or 0)),
            _sign(
                (one.accuracy.mean if one.accuracy else 0) - (other.accuracy.mean if other.accuracy else 0)
            ),
        )
        for number, one in enumerate(rows)
        for other in rows[:number]
    ]
    untied = math.prod(sum(pair[side] != 0 for pair in pairs) for side in (0, 1))
    return sum(before * after for before, after in pairs) / math.sqrt(untied) if untied else None


def is_blind(case: Case) -> bool:
    """Whether it is a window from which no query sees a pair: no wider than the gap, on either side."""
    gap = _number(case.inputs, "gap")
    window = case.options.get("window")
    if case.backend != "window" or gap is None or not isinstance(window, int):
        return False
    return (window - 1 if case.causal else window // 2) <= gap


def _number(inputs: str, name: str) -> int | None:
    """A number of the task, from what records call it."""
    items = dict(item.partition("=")[::2] for item in inputs.partition("(")[2].rstrip(")").split(", "))
    text = items.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else None


def _setting(case: Case) -> tuple[object, ...]:
    """What rows that stand beside each other share."""
    return (
        case.inputs,
        case.tokens,
        case.causal,
        case.batch,
        case.num_heads,
        case.head_dim,
        case.dtype,
        case.device,
        case.threads,
    )


def _row(records: list[Record]) -> Learned:
    right = [r for r in records if r.status == "ok" and r.accuracy is not None and r.answers]
    times_s = [time_s for r in right for time_s in r.times_s or ()]
    errors = [r.output_relative_error for r in records if r.output_relative_error is not None]
    shares, answers = [r.accuracy or 0.0 for r in right], sum(r.answers or 0 for r in right)
    first = right[0] if right else records[0]
    return Learned(
        case=first.case,
        accuracy=accuracy_of(shares, answers) if right else None,
        seeds=len(right),
        chance=first.chance or 0.0,
        step_s=middle(times_s) if times_s else None,
        untrained=fmean(errors) if errors else None,
        state_bytes=first.state_bytes,
        numbers_read=first.numbers_read,
        failed=tuple(r for r in records if r not in right),
    )


def _place(row: Learned) -> tuple[float, bool, str]:
    return -(row.accuracy.mean if row.accuracy else -1.0), row.case.backend != YARDSTICK, row.label


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
