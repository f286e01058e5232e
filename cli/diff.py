"""`efficient-attn diff`: comparison of runs before and after a change."""

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from . import console, exits
from .options import JsonOption

# Stands for the `--` between old and new runs, which the parser would swallow; no argument can hold it.
_NEW_RUNS = "\0"


class CommandClass(TyperCommand):
    """Keeps the place of `--` among the arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments with a sign in the place of `--`."""
        return super().parse_args(ctx, [_NEW_RUNS if argument == "--" else argument for argument in args])


def diff(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="OLD NEW",
            help="Folders of runs, or files of records; several a side: OLD OLD -- NEW NEW.",
        ),
    ],
    fail_on: Annotated[
        str | None,
        typer.Option(
            "--fail-on",
            metavar="NAME:LIMIT[,…]",
            help="Changes for the worse that exit with code 1, by quantity or kind: time:10%,accuracy:2%;"
            " all regressions if omitted.",
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown for a comment on a pull request.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Compare runs case by case: exit code 1 on a regression.

    Two runs, or several old runs, --, and several new ones.

    Example: efficient-attn diff runs/before runs/after --fail-on time:10%
    """
    from efficient_attn.studies.diff import diff as compare

    if as_json and markdown:
        raise typer.BadParameter("--json and --markdown exclude each other.")
    comparison = compare(*_sides(runs), fail_on=_limits(fail_on))
    if as_json:
        console.put_json(comparison.as_dict())
    elif markdown:
        for row in comparison.to_markdown().splitlines():
            console.put(row)
    else:
        for warning in comparison.warnings:
            console.tell(warning)
        console.print_tables(comparison.tables())
        for sentence in comparison.sentences():
            console.tell(sentence)
    if not comparison.comparison.changes:
        console.say("Nothing to compare: no case is in both runs.")
        return exits.NOTHING_MEASURED
    return exits.REGRESSION if comparison.regressions else exits.DONE


def _sides(runs: list[str]) -> tuple[list[str], list[str]]:
    """The old and the new runs: before and behind `--`, or two without it."""
    at = runs.index(_NEW_RUNS) if runs.count(_NEW_RUNS) == 1 else 1
    old, new = runs[:at], runs[at + 1 if _NEW_RUNS in runs else at :]
    if not old or not new or _NEW_RUNS in new or (_NEW_RUNS not in runs and len(new) > 1):
        typed = " ".join("--" if argument == _NEW_RUNS else argument for argument in runs)
        raise typer.BadParameter(f"diff {typed}: write OLD NEW, or several on a side, OLD OLD -- NEW NEW.")
    return old, new


def _limits(text: str | None) -> dict[str, float] | None:
    """`time:10%` as {"time": 0.1}; None without names."""
    shares = {}
    for part in [] if text is None else text.split(","):
        name, _, share = (piece.strip() for piece in part.partition(":"))
        try:
            shares[name] = float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
        except ValueError:
            raise typer.BadParameter(
                f"--fail-on {text}: write names with shares, such as time:10%,accuracy:2%."
            ) from None
    return shares or None
