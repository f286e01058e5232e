"""Results of run folders and files of records: one run, shares of a run, runs of several machines."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from efficient_attn.errors import DataError
from efficient_attn.report import machines
from efficient_attn.runner.records import read as read_records
from efficient_attn.stats.noise_warnings import doubts
from efficient_attn.studies import studies
from efficient_attn.studies.results import Results
from efficient_attn.studies.run_folder import ENVIRONMENT, RECORDS, read_json
from efficient_attn.studies.shard import by_run, common, in_order, missing


def read(*paths: str | Path) -> Results:
    """The results in folders of runs, or in files of records, taken together; shares of a run are one run.

    Raises:
        DataError: If there are none, or a file holds something else.
    """
    if not paths:
        raise DataError("Nothing to read: name at least one folder of a run, or a file of records.")
    runs = [run for run, _ in join_shares([read_one(path) for path in paths])]
    return runs[0] if len(runs) == 1 else together(runs)


def read_one(path: str | Path) -> Results:
    """The results in one folder, or in one file of records."""
    studies()
    path = Path(path)
    file = path / RECORDS if path.is_dir() else path
    reading = read_records(file)
    # A repetition of a failed measurement stands in the file besides the failure.
    latest = {record.case.key: record for record in reading.records}.values()
    torn = [f"The last line of {file.name} was cut off and is left out."] if reading.torn else []
    known = read_json(file.parent / ENVIRONMENT) if (file.parent / ENVIRONMENT).exists() else {}
    return Results(latest, environment=known, notes=[*torn, *doubts(latest, known)])


def join_shares(parts: Sequence[Results]) -> list[tuple[Results, list[int]]]:
    """Every run with the indices of its parts: shares of one run are joined in the order of its plan."""
    found = []
    for group in by_run([part.environment for part in parts]):
        shares = [parts[index] for index in group]
        environments = [share.environment for share in shares]
        run = shares[0] if len(shares) == 1 else _joined(shares, common(environments))
        records = in_order(run.records, environments[0]) if len(shares) > 1 else run.records
        # A share that was measured here has a note on all others.
        stale = {note for one in environments for note in missing([one])}
        notes = [*missing(environments), *(note for note in run.notes if note not in stale)]
        found.append((Results(records, environment=run.environment, notes=notes), group))
    return found


def together(runs: Sequence[Results]) -> Results:
    """All runs as one, with the results of each machine if there are several."""
    environments = [run.environment for run in runs]
    groups: dict[str, list[Results]] = {}
    for name, run in zip(machines.names(environments), runs, strict=True):
        groups.setdefault(name, []).append(run)
    if len(groups) == 1:
        return _joined(runs)
    known = {**common(environments), "processor": "; ".join(groups)}
    found = _joined(runs, known)
    for name, group in groups.items():
        whole = common([one.environment for one in group])
        found.by_machine[name] = group[0] if len(group) == 1 else _joined(group, whole)
    return found


def _joined(runs: Sequence[Results], environment: Mapping[str, Any] | None = None) -> Results:
    """The records of all runs."""
    records = [record for run in runs for record in run.records]
    notes = dict.fromkeys(note for run in runs for note in run.notes)
    return Results(records, environment=environment, notes=notes)
