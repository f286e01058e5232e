"""`efficient-attn diff`: comparison of runs before and after a change."""

from typing import Annotated

import typer

from . import DONE, NOTHING_MEASURED, REGRESSION, console
from .flags import JsonOption


def diff(
    old: Annotated[str, typer.Argument(metavar="OLD", help="Folder of a run, or a file of records.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The run to compare with it.")],
    fail_on: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:LIMIT[,…]",
            help="Regressions that exit with code 1, by quantity or kind: time:10%,accuracy:2%; all if"
            " omitted.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Compare two runs and exit with code 1 on a regression.

    Example: efficient-attn diff runs/before runs/after --fail-on time:10%
    """
    from efficient_attn.tools.diff import diff as compare

    comparison = compare(old, new, fail_on=_limits(fail_on))
    if as_json:
        console.put_json(comparison.as_dict())
    else:
        for warning in comparison.warnings:
            console.tell(warning)
        console.print_tables(comparison.tables())
        for sentence in comparison.sentences():
            console.tell(sentence)
    if not comparison.comparison.changes:
        console.say("The runs have no case in common.")
        return NOTHING_MEASURED
    return REGRESSION if comparison.regressions else DONE


def _limits(text: str | None) -> dict[str, float] | None:
    """`time:10%` as {"time": 0.1}, or None without names."""
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
