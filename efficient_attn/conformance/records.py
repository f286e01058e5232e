"""The outcome of a check, kept or broken, with its errors."""

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

KEPT = "kept"
BROKEN = "broken"
NOT_PROMISED = "not promised"
UNPROMISED = "passes, undeclared"
UNKNOWN = "skipped, undeclared"
POSITION_DEPENDENT = "Position-dependent (permuting keys changes the output): order of keys not tested."


class Finding(NamedTuple):
    """One comparison. The promise holds if error ≤ bound, and an error of NaN breaks it."""

    where: str
    error: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.error <= self.bound

    @property
    def share(self) -> float:
        """Error as a fraction of the bound, 0 for exact agreement where the bound is 0."""
        if self.error == 0:
            return 0.0
        return self.error / self.bound if self.bound > 0 else math.inf


@dataclass(frozen=True, kw_only=True)
class CheckRecord:
    """Result of one check of one backend.

    Attributes:
        outcome: kept, broken, not promised, passes, undeclared or skipped, undeclared.
        detail: Smallest input that shows the outcome, reason why nothing was checked, or information.
        error: Error of the comparison with the largest share of its bound, or of the first broken case.
        bound: Largest error of this comparison that keeps the promise.
        case: Settings of the smallest input found that breaks the promise, for `replay`; None if it holds.
        expected: Reason why the author of the backend expects the promise to be broken.
    """

    backend: str
    check: str
    promise: str
    outcome: str
    detail: str = ""
    error: float | None = None
    bound: float | None = None
    case: dict[str, Any] | None = None
    expected: str | None = None
    failed: bool = False
    time_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Fields for strict JSON. A non-finite error becomes None and is described in the detail."""
        fields = asdict(self)
        for name in ("error", "bound"):
            if fields[name] is not None and not math.isfinite(fields[name]):
                fields[name] = None
        return fields

    def sentence(self) -> str:
        """One line: check, outcome and detail."""
        figures = "" if self.error is None else f" (error {self.error:.2g}, at most {self.bound:.2g})"
        reason = "" if self.expected is None else f" [expected: {self.expected}]"
        return f"{self.check}: {self.outcome}. {self.promise} {self.detail}{figures}{reason}".strip()


class BrokenPromiseError(AssertionError):
    """Raised if a backend breaks a promise, with all records of the run."""

    def __init__(self, records: list[CheckRecord]) -> None:
        self.records = records
        failed = [record for record in records if record.failed]
        lines = "\n".join(f"  {record.sentence()}" for record in failed)
        super().__init__(
            f"Backend {failed[0].backend!r} fails {len(failed)} of {len(records)} checks:\n{lines}"
        )
