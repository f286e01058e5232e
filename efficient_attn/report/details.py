"""The table of a report beside those of the command line: what could not be measured, and why."""

from collections.abc import Sequence

from efficient_attn.report.table import Table
from efficient_attn.sweep.records import Case, Record


def details(records: Sequence[Record]) -> list[Table]:
    """As far as there is anything to tell."""
    failures = _failure_table(records)
    return [failures] if failures.rows else []


def without_failures(table: Table, records: Sequence[Record]) -> Table:
    """The table without the notes that repeat why something could not be measured."""
    told = tuple({f": {record.status}: {record.reason}" for record in records if record.status != "ok"})
    return table._replace(notes=tuple(note for note in table.notes if not note.endswith(told)))


def _failure_table(records: Sequence[Record]) -> Table:
    """One row per backend and reason, with all that it kept away."""
    kept_away: dict[tuple[str, str, str], list[Case]] = {}
    for record in {record.case.key: record for record in records}.values():
        if record.status != "ok":
            case = record.case
            key = (case.label, record.status, record.reason or "no reason was given")
            kept_away.setdefault(key, []).append(case)
    rows = [
        (
            label,
            ", ".join(dict.fromkeys(case.kind for case in cases)),
            ", ".join(map(str, sorted({case.tokens for case in cases}))),
            status,
            reason,
        )
        for (label, status, reason), cases in kept_away.items()
    ]
    columns = ("backend", "measured", "tokens", "status", "reason")
    return Table("What could not be measured, and why", columns, tuple(rows))
