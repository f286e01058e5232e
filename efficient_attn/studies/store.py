"""Records of a run: each row is on the disk as soon as it exists, and stored records answer points."""

from collections.abc import Iterable
from pathlib import Path

from efficient_attn.measure.record import Case, Record, merge_rows
from efficient_attn.measure.records import append
from efficient_attn.studies.points import Point

# End of the reason of points that the budget skipped.
OVER_BUDGET = "(raise it with --budget)"

# A resumed run tries these again.
_FAILURES = ("oom", "timeout", "crash", "error", "skipped")


class Store:
    """Records by their case, in the order in which the cases were first measured.

    Args:
        path: File that gets a line per row; None: no file.
        rows: Rows of an earlier run in that file.
        retry_over_budget: Measure points again that the budget of the earlier run skipped.
    """

    def __init__(
        self, path: Path | None = None, rows: Iterable[Record] = (), *, retry_over_budget: bool = False
    ) -> None:
        self._path = path
        self._records = merge_rows([*rows])
        self._closed: set[str] = set()
        self._stale = {
            key
            for key, record in self._records.items()
            if record.status in _FAILURES and (retry_over_budget or not over_budget(record))
        }

    @property
    def records(self) -> tuple[Record, ...]:
        """All records."""
        return tuple(self._records.values())

    def get(self, case: Case) -> Record | None:
        """The record of a case; with the rounds so far if it is timed."""
        return self._records.get(case.key)

    def rounds(self, case: Case) -> int:
        """Number of successful rounds of a timed case."""
        record = self.get(case)
        return 0 if record is None or record.status != "ok" else len(record.round_sizes or ())

    def answers(self, point: Point) -> bool:
        """Whether a point need not be measured: it has all rounds, failed, or was skipped."""
        record = self.get(point.case)
        if record is None or point.case.key in self._stale:
            return False
        complete = point.case.key in self._closed or self.rounds(point.case) >= point.rounds
        return record.status != "ok" or complete

    def add(self, row: Record) -> None:
        """Write and merge a row; a repeated failure is not written twice."""
        key = row.case.key
        known = self._records.get(key)
        self._stale.discard(key)
        if known == row and not row.round_sizes:
            return
        self._records |= merge_rows([row] if known is None else [known, row])
        if self._path is not None:
            append(self._path, row)

    def close(self, case: Case) -> None:
        """Measure no further rounds of a case in this run."""
        self._closed.add(case.key)


def over_budget(record: Record) -> bool:
    """Whether the budget skipped the point."""
    return record.status == "skipped" and (record.reason or "").endswith(OVER_BUDGET)
