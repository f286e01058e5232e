"""The table of failures that a report adds to the tables of the command line."""

from collections.abc import Sequence

from efficient_attn.report.table import Table
from efficient_attn.runner.records import Case, Record


def details(records: Sequence[Record]) -> list[Table]:
    """The table of failures, if there are any."""
    failures = _failure_table(records)
    return [failures] if failures.rows else []


def without_failures(table: Table, records: Sequence[Record]) -> Table:
    """The table without the notes that repeat the reasons of failures."""
    reasons = tuple({f": {record.status}: {record.reason}" for record in records if record.status != "ok"})
    return table._replace(notes=tuple(note for note in table.notes if not note.endswith(reasons)))


def _failure_table(records: Sequence[Record]) -> Table:
    """One row per backend and reason, with the points that failed."""
    failed: dict[tuple[str, str, str], list[Case]] = {}
    for record in {record.case.key: record for record in records}.values():
        if record.status != "ok":
            case = record.case
            key = (case.label, record.status, record.reason or "no reason was given")
            failed.setdefault(key, []).append(case)
    rows = [
        (
            label,
            ", ".join(dict.fromkeys(case.kind for case in cases)),
            ", ".join(map(str, sorted({case.tokens for case in cases}))),
            status,
            reason,
        )
        for (label, status, reason), cases in failed.items()
    ]
    columns = ("backend", "measured", "tokens", "status", "reason")
    return Table("Points that could not be measured", columns, tuple(rows))
