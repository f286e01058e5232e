"""`efficient-attn diff`: two runs, and what became worse."""

from pathlib import Path
from typing import Annotated

import typer

from . import exits, talk
from .options import JsonToOption, as_json

OldArgument = Annotated[Path, typer.Argument(metavar="OLD", help="A folder of a run, or a file of records.")]
NewArgument = Annotated[Path, typer.Argument(metavar="NEW", help="The run to compare with it.")]
FailOnOption = Annotated[
    str | None,
    typer.Option(
        "--fail-on",
        metavar="KIND:SHARE[,…]",
        help="What ends with exit code 1: time:10%,memory:0%,error:5%; all kinds if left out.",
    ),
]


def diff(
    old: OldArgument, new: NewArgument, fail_on: FailOnOption = None, json_to: JsonToOption = None
) -> int:
    """Compare two runs case by case; exit code 1 if anything became worse.

    Example: efficient-attn diff runs/before runs/after --fail-on time:10%
    """
    from efficient_attn.experiments.diff import diff as compare

    to_stdout = as_json(json_to)
    found = compare(old, new, fail_on=None if fail_on is None else _shares(fail_on))
    if to_stdout:
        talk.put_json(found.as_dict())
    else:
        for warning in found.warnings:
            talk.put(warning)
        talk.print_tables(found.tables())
        for sentence in found.sentences():
            talk.put(sentence)
    if not found.comparison.changes:
        talk.say("Nothing to compare: no case is in both runs.")
        return exits.NOTHING_MEASURED
    return exits.REGRESSION if found.regressions else exits.DONE


def _shares(text: str) -> dict[str, float]:
    """`time:10%,memory:0` as {"time": 0.1, "memory": 0.0}."""
    shares = {}
    for part in text.split(","):
        kind, _, share = part.strip().partition(":")
        number = share.strip()
        try:
            value = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
        except ValueError:
            message = f"--fail-on {text}: write kinds with shares, such as time:10%,memory:0%."
            raise typer.BadParameter(message) from None
        shares[kind.strip()] = value
    return shares
