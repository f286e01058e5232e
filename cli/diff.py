"""`efficient-attn diff`: runs before and after, and what became worse."""

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from . import exits, talk
from .options import JsonToOption, as_json

# Stands for the `--` between old and new runs, which the parser would swallow; no argument can hold it.
_NEW_RUNS = "\0"

RunsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="OLD NEW", help="Folders of runs, or files of records; several a side: OLD OLD -- NEW NEW."
    ),
]
FailOnOption = Annotated[
    str | None,
    typer.Option(
        "--fail-on",
        metavar="NAME:SHARE[,…]",
        help="Quantities or kinds that end with exit code 1 if worse: time:10%,accuracy:2%; default: all.",
    ),
]


class CommandClass(TyperCommand):
    """Keeps the place of `--` among the arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments with a sign in the place of `--`."""
        return super().parse_args(ctx, [_NEW_RUNS if one == "--" else one for one in args])


def diff(runs: RunsArgument, fail_on: FailOnOption = None, json_to: JsonToOption = None) -> int:
    """Compare two runs, or several on each side, case by case; exit code 1 if anything became worse.

    Example: efficient-attn diff runs/before runs/after --fail-on time:10%
    """
    from efficient_attn.experiments.diff import diff as compare

    to_stdout = as_json(json_to)
    found = compare(*_sides(runs), fail_on=None if fail_on is None else _shares(fail_on))
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


def _sides(runs: list[str]) -> tuple[list[str], list[str]]:
    """The old and the new runs: before and behind `--`, or two without it."""
    at = runs.index(_NEW_RUNS) if runs.count(_NEW_RUNS) == 1 else 1
    old, new = runs[:at], runs[at + 1 if _NEW_RUNS in runs else at :]
    if not old or not new or _NEW_RUNS in new or (_NEW_RUNS not in runs and len(new) > 1):
        given = " ".join("--" if one == _NEW_RUNS else one for one in runs)
        raise typer.BadParameter(f"diff {given}: write OLD NEW, or several on a side, OLD OLD -- NEW NEW.")
    return old, new


def _shares(text: str) -> dict[str, float]:
    """`time:10%,memory:0` as {"time": 0.1, "memory": 0.0}."""
    shares = {}
    for part in text.split(","):
        kind, _, share = part.strip().partition(":")
        number = share.strip()
        try:
            value = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
        except ValueError:
            message = f"--fail-on {text}: write names with shares, such as time:10%,accuracy:2%."
            raise typer.BadParameter(message) from None
        shares[kind.strip()] = value
    return shares
