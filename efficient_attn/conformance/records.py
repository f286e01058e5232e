"""What becomes of a promise: kept or broken, with the figures that show it."""

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

KEPT = "kept"
BROKEN = "broken"
NOT_PROMISED = "not promised"
UNPROMISED = "kept without promise"
UNKNOWN = "could not check"


class Finding(NamedTuple):
    """One comparison: the promise holds where error ≤ bound; an error of NaN breaks it.

    Attributes:
        where: What was compared, for whoever has to find the fault.
    """

    where: str
    error: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.error <= self.bound

    @property
    def share(self) -> float:
        """How much of the bound is used; 0 for an exact agreement that had to be exact."""
        if self.error == 0:
            return 0.0
        return self.error / self.bound if self.bound > 0 else math.inf


@dataclass(frozen=True, kw_only=True)
class CheckRecord:
    """What a check found about one promise of one backend.

    Attributes:
        check: Name of the check.
        promise: The promise in words.
        outcome: kept, broken, not promised, kept without promise or could not check.
        detail: The smallest input that shows it; why there was nothing to check.
        error: The largest error, as a share of its bound; that of the first broken case.
        bound: The largest error that keeps the promise there.
        expected: Why the backend's author expects the promise to be broken.
        failed: Whether this outcome fails the backend.
        time_s: How long the check took.
    """

    backend: str
    check: str
    promise: str
    outcome: str
    detail: str = ""
    error: float | None = None
    bound: float | None = None
    expected: str | None = None
    failed: bool = False
    time_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Fields for strict JSON; a figure that is not finite becomes None, its detail says so."""
        fields = asdict(self)
        for name in ("error", "bound"):
            if fields[name] is not None and not math.isfinite(fields[name]):
                fields[name] = None
        return fields

    def sentence(self) -> str:
        """One line: the check, what became of it, where."""
        figures = "" if self.error is None else f" (error {self.error:.2g}, at most {self.bound:.2g})"
        reason = "" if self.expected is None else f" [expected: {self.expected}]"
        return f"{self.check}: {self.outcome}. {self.promise} {self.detail}{figures}{reason}".strip()


class BrokenPromiseError(AssertionError):
    """A backend does not do what it promises.

    Attributes:
        records: All records of the run.
    """

    def __init__(self, records: list[CheckRecord]) -> None:
        self.records = records
        failed = [record for record in records if record.failed]
        lines = "\n".join(f"  {record.sentence()}" for record in failed)
        super().__init__(
            f"Backend {failed[0].backend!r} fails {len(failed)} of {len(records)} checks:\n{lines}"
        )
