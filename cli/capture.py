"""`efficient-attn capture`: q, k and v of a local model on a text, as input of `mse`."""

from pathlib import Path
from typing import Annotated

import typer

from efficient_attn.errors import DataError, OptionError
from efficient_attn.measure.texts import read_text
from efficient_attn.studies.options import parse_layers

from . import console

ModelArgument = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL_FOLDER",
        help="Folder of a Hugging Face transformers model: config.json and safetensors.",
    ),
]
NameOption = Annotated[
    str | None, typer.Option("--name", help="Name of the model in the file; the folder's if omitted.")
]
TextOption = Annotated[
    Path, typer.Option("--text", metavar="FILE", help="UTF-8 text; tokens beyond --max-tokens are ignored.")
]
LayersOption = Annotated[
    str | None,
    typer.Option("--layers", metavar="N[,N…]", help="Layers to keep, counted from 0; all if omitted."),
]
MaxTokensOption = Annotated[
    int,
    typer.Option("--max-tokens", min=1, metavar="N", help="Most tokens; the model's own limit also holds."),
]
FileOption = Annotated[Path, typer.Option("--out", metavar="FILE.safetensors", help="New file to write.")]


def capture_command(
    model_folder: ModelArgument,
    text: TextOption,
    out: FileOption,
    layers: LayersOption = None,
    max_tokens: MaxTokensOption = 512,
    name: NameOption = None,
) -> None:
    """Save q, k and v of a model on a text, as input of mse.

    Example: efficient-attn capture MODEL --text alice.txt --layers 0,1,5 --out alice.safetensors
    """
    if out.suffix != ".safetensors":
        raise OptionError(f"--out is a file that ends in .safetensors, not {str(out)!r}.")
    if out.exists():
        raise DataError(f"--out: {out} exists already; name a new file.")
    chosen = None if layers is None else parse_layers(layers, name="--layers")
    words = read_text(text)

    from efficient_attn.integrations.capture import capture, save

    captured = capture(model_folder, words, layers=chosen, max_tokens=max_tokens, name=name)
    save(captured, out)
    kept = ", ".join(map(str, captured.layers))
    console.say(
        f"Layers {kept} on {len(captured.tokens)} tokens. Measure on them: efficient-attn mse --inputs {out}"
    )
    console.put(out)
