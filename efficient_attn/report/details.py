"""Tables of a report beside those of the command line: crossovers, and what could not be measured and why."""

from collections.abc import Sequence

from efficient_attn.analysis.crossover import crossovers
from efficient_attn.analysis.curves import curves
from efficient_attn.report.sentences import round_tokens
from efficient_attn.report.table import Table
from efficient_attn.sweep.records import Case, Record


def details(records: Sequence[Record]) -> list[Table]:
    """As far as there is anything to tell."""
    made = (_crossover_table(records), _failure_table(records))
    return [table for table in made if table.rows]


def without_failures(table: Table, records: Sequence[Record]) -> Table:
    """The table without the notes that repeat why something could not be measured."""
    told = tuple({f": {record.status}: {record.reason}" for record in records if record.status != "ok"})
    return table._replace(notes=tuple(note for note in table.notes if not note.endswith(told)))


def _crossover_table(records: Sequence[Record]) -> Table:
    found = crossovers(curves(records, "time_s"))
    rows = [
        (
            one.label,
            str(round_tokens(one.tokens)),
            "below the shortest length" if one.low is None else str(round_tokens(one.low)),
            "unbounded" if one.high is None else str(round_tokens(one.high)),
            "extrapolated" if one.extrapolated else "interpolated",
        )
        for one in found
    ]
    columns = ("backend", "tokens", "from", "to", "how")
    return Table("Faster than fused exact attention from, with a 95 % interval", columns, tuple(rows))


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
