"""`efficient-attn show`: implied attention weights as heat maps with the words on the axes."""

import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from efficient_attn.measure.units import parse_names

from . import DONE, SOME_NOT_MEASURED, console
from .flags import BackendOption, OutOption, SeedOption, SetOption


def show_command(
    inputs: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="encoder (512 tokens), decoder (4096, causal) or FILE.safetensors."
        ),
    ] = "encoder",
    layer: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Layer index; 1 (encoder) or the first layer if omitted."),
    ] = None,
    head: Annotated[int, typer.Option(min=0, help="Head index.")] = 6,
    tokens: Annotated[
        str, typer.Option(metavar="A:B", help="Tokens on the axes; attention is over the whole input.")
    ] = "0:24",
    backend: BackendOption = None,
    set_: SetOption = None,
    seed: SeedOption = 0,
    out: OutOption = None,
) -> None:
    """Draw the attention weights that backends imply on a text.

    Example: efficient-attn show --backend window,my_file.py:my_attention --tokens 30:60 --head 2
    """
    from efficient_attn.measure.variants import parse_settings
    from efficient_attn.report.files import save
    from efficient_attn.runs.store import open_folder, run_folder
    from efficient_attn.tools.show import show

    names, options = parse_names(backend, name="--backend"), parse_settings(set_ or [])
    # Output of a backend goes to stderr: stdout holds the results alone.
    with redirect_stdout(sys.stderr):
        shown = show(names, inputs=inputs, layer=layer, head=head, tokens=tokens, options=options, seed=seed)
    folder = open_folder(out or run_folder("show"), name="--out")
    console.print_tables([shown.table()])
    for path in save(shown.plot(), folder, "show"):
        console.put(path)
    raise typer.Exit(SOME_NOT_MEASURED if shown.notes and backend else DONE)
