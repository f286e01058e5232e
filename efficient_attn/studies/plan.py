"""A plan: every record to come, known before anything runs."""

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from efficient_attn.runner.record import Case, Record, joined

# Key of a run's environment that names its study.
STUDY = "study"

# Key of a run's environment with the digest of the code of every backend from a file, by name.
CODE = "code"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One record to come.

    Attributes:
        measure: Measurement of the record; of a timed point with the seconds of calls of one round.
        merge: The record of the rounds so far.
        rounds: Rounds of a timed point, interleaved with the other timed points of its group and merged into
            one record; None: measured once.
        label: Name in the progress display; omitted: backend, length and kind.
        group: Key of points measured together, where they follow one another.
        series: Key of points whose durations are proportional to their `cost`.
        cost: Predicted cost of the point, relative to others of its series.
        calls: Duration in calls of the timed points of the series; None: a duration of its own.
        needs: Case that must have been measured successfully; otherwise the point is dropped.
        skip: Reason not to measure it.
        needed: Whether the point is measured, decided when it is due; otherwise it is dropped.
        rank: Place in its group, decided when the group begins: the least first.
    """

    case: Case
    measure: Callable[..., Record]
    merge: Callable[[Sequence[Record]], Record] = joined
    rounds: int | None = None
    label: str | None = None
    group: Hashable = None
    series: Hashable = None
    cost: float = 1.0
    calls: int | None = None
    needs: Case | None = None
    skip: str | None = None
    needed: Callable[[], bool] = lambda: True
    rank: Callable[[], float] = lambda: 0.0

    @property
    def shown(self) -> str:
        """Name in the progress display."""
        case = self.case
        place = "" if case.of == "attention" else f", {case.of}"
        return self.label or f"{case.label}{place}, {case.tokens} tokens, {case.kind}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All points of a run, in the order in which they are measured: the most promising first.

    Attributes:
        notes: Remarks on the plan, such as omitted sizes.
        about: Entries of the run's environment; an entry `STUDY` replaces the name of the study.
        timeout_s: Seconds of one point, all its rounds together.
        resources: Context that is held open while points are measured.
        attach: The plan as it is continued in a folder, `attach(plan, folder, resume=…)`.
        budget_s: Seconds of measuring unless the run names others.
        observe: Receives every record, earlier runs included, before the next point is due.
        undivided: Reason why an executor cannot measure the points; None: it can.
        standing: Records of an earlier run that are kept when it is resumed; the others are measured again.
    """

    points: Sequence[Point]
    device: str = "cpu"
    notes: Sequence[str] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = math.inf
    resources: AbstractContextManager[Any] = field(default_factory=nullcontext)
    attach: "Callable[..., Plan] | None" = None
    budget_s: float | None = None
    observe: Callable[[Record], object] = lambda record: None
    undivided: str | None = None
    standing: Callable[[Mapping[str, Record]], Mapping[str, Record]] = dict


def interleaved(lines: Iterable[Iterable[Point]]) -> list[Point]:
    """The first point of every line, then the second ones; each case once."""
    rows = itertools.zip_longest(*lines)
    return list({point.case.key: point for row in rows for point in row if point is not None}.values())
