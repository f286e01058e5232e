"""Points of a run, and the plan of a study that yields them."""

import itertools
import math
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from efficient_attn.measure.record import Case, Record

# Keys of a run's environment: name of the study, and digest of the code of every backend from a file.
STUDY, CODE = "study", "code"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement to come, as data that an executor can send to another process.

    Attributes:
        measure: Function of a module, or a partial of one, that returns the record; of a timed point it takes
            the `seconds` of the calls of one round.
        rounds: Interleaved rounds of a timed point; 0: measured once.
        label: Name in the progress display; None: backend, length and kind.
        series: Key of points whose durations are proportional to their `cost`.
        skip: Reason not to measure it.
    """

    case: Case
    measure: Callable[..., Record]
    rounds: int = 0
    label: str | None = None
    series: Hashable = None
    cost: float = 1.0
    skip: str | None = None

    @property
    def title(self) -> str:
        """Name in the progress display."""
        case = self.case
        place = "" if case.of == "attention" else f", {case.of}"
        return self.label or f"{case.label}{place}, {case.tokens} tokens, {case.kind}"


Request = Point | list[Point]
Steps = Generator[Request, Any, None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A study whose options are checked and whose inputs are loaded.

    Attributes:
        steps: Function that starts the study; a run starts it more than once.
        notes: Remarks such as omitted sizes.
        about: Entries of the run's environment.
        fixed: Names of entries on which the study decides; a resumed run must have equal ones.
        timeout_s: Seconds of one point, all its rounds together.
        resources: Context that is open while points are measured.
        budget_s: Seconds of measuring unless the user names others; None: no limit.
    """

    steps: Callable[[], Steps]
    device: str = "cpu"
    notes: Sequence[str] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    fixed: Sequence[str] = ()
    timeout_s: float = math.inf
    resources: AbstractContextManager[Any] = field(default_factory=nullcontext)
    budget_s: float | None = None


def in_lists(lists: Iterable[list[Point]]) -> Steps:
    """The steps of a study whose points do not depend on records."""
    for points in lists:  # noqa: UP028  (records are sent to a generator, not to an iterator of lists)
        yield points


def interleaved(lines: Iterable[Iterable[Point]]) -> list[Point]:
    """The first point of every line, then the second ones; each case once."""
    rows = itertools.zip_longest(*lines)
    return list({point.case.key: point for row in rows for point in row if point is not None}.values())
