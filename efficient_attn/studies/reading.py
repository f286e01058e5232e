"""Results in run folders and files of records, of one run or of several."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from efficient_attn.errors import DataError
from efficient_attn.measure.record import Record, merge_rows
from efficient_attn.measure.records import read as read_records
from efficient_attn.report.methods import flat
from efficient_attn.stats.noise_warnings import DURING, doubts
from efficient_attn.studies import studies
from efficient_attn.studies.results import Results
from efficient_attn.studies.run_folder import ENVIRONMENT, RECORDS, read_json

# Entries that identify a machine; times of two are never drawn as one run.
_MACHINE = ("gpu.name", "processor", "machine", "cores_usable", "torch.version")


def read(*paths: str | Path) -> Results:
    """All records in folders of runs, or in files of records.

    Rows of several runs name their run. Such results are drawn together unless two runs measured one case, or
    times are of several machines.

    Raises:
        DataError: If there are none, or a file holds something else.
    """
    if not paths:
        raise DataError("Nothing to read: name at least one folder of a run, or a file of records.")
    runs = {str(path): read_one(path) for path in paths}
    if len(runs) == 1:
        return next(iter(runs.values()))
    return Results(
        [record for run in runs.values() for record in run.records],
        environment=_common([run.environment for run in runs.values()]),
        notes=dict.fromkeys(note for run in runs.values() for note in run.notes),
        runs=[name for name, run in runs.items() for _ in run.records],
        conflict=_conflict(runs),
    )


def read_one(path: str | Path) -> Results:
    """The results in one folder, or in one file of records."""
    studies()
    path = Path(path)
    file = path / RECORDS if path.is_dir() else path
    reading = read_records(file)
    # Rounds, and repetitions of failed measurements, are rows of their own.
    records = merge_rows(reading.records).values()
    torn = [f"The last line of {file.name} was cut off and is left out."] if reading.torn else []
    known = read_json(file.parent / ENVIRONMENT) if (file.parent / ENVIRONMENT).exists() else {}
    return Results(records, environment=known, notes=[*torn, *doubts(records, known)])


def _conflict(runs: Mapping[str, Results]) -> str | None:
    """Reason why these runs cannot be drawn as one; None: they can."""
    measured: dict[str, tuple[str, Record]] = {}
    for name, run in runs.items():
        for record in run.records:
            first, known = measured.setdefault(record.case.key, (name, record))
            if known != record:
                case = record.case
                return f"{first} and {name} both measured {case.label}, {case.tokens} tokens, {case.kind}"
    timed = [run for run in runs.values() if any(record.times_s for record in run.records)]
    machines = dict.fromkeys(_machine(run.environment) for run in timed)
    return f"The times are of several machines ({'; '.join(machines)})" if len(machines) > 1 else None


def _machine(environment: Mapping[str, Any]) -> str:
    entries = dict(flat(environment))
    return ", ".join(f"{name} {entries[name]}" for name in _MACHINE if name in entries) or "unrecorded"


def _common(environments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Entries on which all runs agree; conditions during the runs are joined."""
    during = [entry for one in environments if isinstance(one.get(DURING), list) for entry in one[DURING]]
    return {**_equal(environments), **({DURING: during} if during else {})}


def _equal(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    common: dict[str, Any] = {}
    for name, value in values[0].items():
        entries = [entry.get(name) for entry in values]
        nested = [entry for entry in entries if isinstance(entry, Mapping)]
        if len(nested) == len(entries):
            common[name] = _equal(nested)
        elif all(entry == value for entry in entries):
            common[name] = value
    return common
