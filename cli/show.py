"""`efficient-attn show`: implied attention weights as heat maps with the words on the axes."""

import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from . import console, exits
from .options import (
    BackendOption,
    ExtraArguments,
    OutOption,
    SeedOption,
    SetOption,
    names,
    refuse_extra,
)
from .plan_file import PlanOption

TextOption = Annotated[
    str,
    typer.Option(
        "--inputs",
        metavar="NAME",
        help="encoder (shipped), stitched (four documents concatenated) or FILE.safetensors.",
    ),
]
HeadOption = Annotated[int, typer.Option("--head", min=0, help="Which head of the layer.")]
ShownTokensOption = Annotated[
    str, typer.Option("--tokens", metavar="A:B", help="Those on the axes; backends read all of the inputs.")
]
ShownLayerOption = Annotated[
    int | None,
    typer.Option(
        "--layer", min=0, metavar="N", help="Layer of the encoder or file: 1, or the first of a file."
    ),
]


def show_command(
    plan: PlanOption = None,
    extra: ExtraArguments = None,
    inputs: TextOption = "encoder",
    layer: ShownLayerOption = None,
    head: HeadOption = 6,
    tokens: ShownTokensOption = "0:24",
    backend: BackendOption = None,
    set_: SetOption = None,
    seed: SeedOption = 0,
    out: OutOption = None,
) -> None:
    """Draw implied attention weights of backends on a text.

    Example: efficient-attn show --backend window,my_file.py:my_attention --tokens 30:60 --head 2
    """
    from efficient_attn.report.save import save
    from efficient_attn.runner.variants import parse_settings
    from efficient_attn.studies.run_files import open_folder, run_folder
    from efficient_attn.studies.show import show

    refuse_extra(extra)
    # Output of a backend goes to stderr: stdout holds the results alone.
    with redirect_stdout(sys.stderr):
        shown = show(
            names(backend),
            inputs=inputs,
            layer=layer,
            head=head,
            tokens=tokens,
            options=parse_settings(set_ or []),
            seed=seed,
        )
    folder = open_folder(out or run_folder("show"), name="--out")
    console.print_tables([shown.table()])
    for path in save(shown.plot(), folder, "show"):
        console.put(path)
    raise typer.Exit(exits.SOME_NOT_MEASURED if shown.notes and backend else exits.DONE)
