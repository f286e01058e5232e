"""Options that several commands share, each declared once."""

from pathlib import Path
from typing import Annotated

import typer

from efficient_attn.limits import WHOLE_NUMBER
from efficient_attn.runs.shared_options import RUNS_CODE

BackendOption = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        metavar="NAME[,NAME…]",
        help=f"Backend names or FILE.py:function; one of each kind if omitted. {RUNS_CODE}",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME.OPTION=V[,V…]", help="Backend option; several values give several variants."
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, max=WHOLE_NUMBER, help="Random seed.")]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="New folder for the results; runs/NAME-TIME if omitted."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
