"""End of a command that measures: its output and its exit code."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import typer

from . import console, exits


def finish(
    results: Any, named: Sequence[str] | None, *, folder: Path, as_json: bool, quiet: bool = False
) -> NoReturn:
    """Print the results, then the folder of their files, and exit with the code of the outcome.

    Args:
        named: Requested backends; None for the default selection.
    """
    if as_json:
        console.put_json(document(results))
    elif not quiet:
        console.print_tables(results.tables())
        for sentence in results.sentences():
            console.tell(sentence)
        for note in results.notes:
            console.tell(note, err=True)
    # With JSON, stdout holds the document alone.
    console.put(folder, err=as_json)
    raise typer.Exit(exit_code(results, named))


def document(results: Any) -> dict[str, Any]:
    """The results as one JSON document."""
    from efficient_attn.measure.records import line

    return {
        "environment": results.environment,
        "records": [json.loads(line(record)) for record in results.records],
        "sentences": results.sentences(),
        "notes": list(results.notes),
        "interrupted": results.interrupted,
    }


def exit_code(results: Any, named: Sequence[str] | None) -> int:
    """Exit code of the outcome.

    Refusals and skips of a default selection are expected, and so is the refusal of some inputs, such as
    causal ones, by a backend that is measured on others.
    """
    from efficient_attn.measure.variants import CEILING, OWN, PLAN, UNIFORM_ATTENTION, YARDSTICK

    if results.interrupted:
        return exits.INTERRUPTED
    # Baselines are measured with every selection; a plan is a decision, also for no backend.
    baselines = {CEILING, UNIFORM_ATTENTION, OWN, PLAN}
    if named is not None and YARDSTICK not in named:
        baselines.add(YARDSTICK)
    candidates = [record for record in results.records if record.case.backend not in baselines]
    failed = [record for record in candidates if record.status != "ok"]
    if len(failed) == len(candidates):
        return exits.NOTHING_MEASURED
    measured = {record.case.label for record in candidates if record.status == "ok"}
    refused = [
        record for record in failed if record.status == "unsupported" and record.case.label in measured
    ]
    unexpected = [
        record
        for record in failed
        if record not in refused and (named or record.status not in ("unsupported", "skipped"))
    ]
    return exits.SOME_NOT_MEASURED if unexpected else exits.DONE
