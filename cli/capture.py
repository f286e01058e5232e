"""`efficient-attn capture`: q, k and v of a model of one's own or on a text, as input of `mse`."""

from pathlib import Path
from typing import Annotated

import typer

from efficient_attn.errors import DataError, OptionError
from efficient_attn.measure.texts import read_text
from efficient_attn.studies.options import MODEL_HELP, parse_layers

from . import console

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
NameOption = Annotated[
    str | None,
    typer.Option("--name", help="Name of the model in the file; the folder's or file's if omitted."),
]
TextOption = Annotated[
    Path | None,
    typer.Option(
        "--text", metavar="FILE", help="UTF-8 text of a folder; tokens beyond --max-tokens are ignored."
    ),
]
LayersOption = Annotated[
    str | None,
    typer.Option("--layers", metavar="N[,N…]", help="Layers to keep, counted from 0; all if omitted."),
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", min=1, metavar="N", help="Most tokens of a text; 512, or the model's own limit."
    ),
]
FileOption = Annotated[Path, typer.Option("--out", metavar="FILE.safetensors", help="New file to write.")]


def capture_command(
    model: ModelArgument,
    out: FileOption,
    text: TextOption = None,
    layers: LayersOption = None,
    max_tokens: MaxTokensOption = None,
    name: NameOption = None,
) -> None:
    """Save q, k and v of a model as input of mse and compare.

    Example: efficient-attn capture MODEL --text alice.txt --layers 0,1,5 --out alice.safetensors

    Example: efficient-attn capture models.py:make_model --out mine.safetensors
    """
    if out.suffix != ".safetensors":
        raise OptionError(f"--out is a file that ends in .safetensors, not {str(out)!r}.")
    if out.exists():
        raise DataError(f"--out: {out} exists already; name a new file.")
    chosen = None if layers is None else parse_layers(layers, name="--layers")
    words = None if text is None else read_text(text)

    from efficient_attn.integrations.capture import captured_model, notes_of, save_activations

    captured = captured_model(model, text=words, layers=chosen, max_tokens=max_tokens, name=name)
    save_activations(captured, out)
    kept = ", ".join(map(str, captured.layers))
    tokens = max(one.k.shape[-2] for one in captured.layers.values())
    for note in notes_of(captured):
        console.tell(note, err=True)
    console.say(f"Layers {kept} on {tokens} tokens. Measure on them: efficient-attn mse --inputs {out}")
    console.put(out)
