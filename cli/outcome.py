"""How a command that measures ends: what it prints, and the exit code that says how it went."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import typer

from . import exits, talk


def finish(
    results: Any, named: Sequence[str] | None, *, folder: Path, as_json: bool, quiet: bool = False
) -> NoReturn:
    """Print what was found, the folder of its files last, and leave with the exit code.

    Args:
        named: The backends that were asked for; None for a default selection.
    """
    if as_json:
        talk.put_json(document(results))
    elif not quiet:
        talk.print_tables(results.tables())
        for sentence in results.sentences():
            talk.put(sentence)
        for note in results.notes:
            talk.say(note)
    # With JSON, stdout is one document and nothing else.
    talk.put(folder, err=as_json)
    raise typer.Exit(exit_code(results, named))


def document(results: Any) -> dict[str, Any]:
    """The results as one JSON document."""
    from efficient_attn.sweep.records import line

    return {
        "environment": results.environment,
        "records": [json.loads(line(record)) for record in results.records],
        "sentences": results.sentences(),
        "notes": list(results.notes),
        "interrupted": results.interrupted,
    }


def exit_code(results: Any, named: Sequence[str] | None) -> int:
    """How it went. In a default selection refusals and skips are expected, other failures are not."""
    from efficient_attn.analysis.curves import YARDSTICK
    from efficient_attn.sweep.sizes import YARDSTICKS
    from efficient_attn.sweep.variants import CEILING

    if results.interrupted:
        return exits.INTERRUPTED
    # Yardsticks are measured whether they were asked for or not.
    beside = {CEILING, *YARDSTICKS}
    if named is not None and YARDSTICK not in named:
        beside.add(YARDSTICK)
    asked = [record for record in results.records if record.case.backend not in beside]
    failed = [record for record in asked if record.status != "ok"]
    if len(failed) == len(asked):
        return exits.NOTHING_MEASURED
    unexpected = [record for record in failed if named or record.status not in ("unsupported", "skipped")]
    return exits.SOME_NOT_MEASURED if unexpected else exits.DONE
