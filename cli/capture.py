"""`efficient-attn capture`: q, k and v of a local encoder on a text, as a file that `mse` can read."""

from pathlib import Path
from typing import Annotated

import typer

from efficient_attn.errors import DataError, OptionError

from . import talk

# A text of more bytes than this is no text for one sequence.
_MOST_BYTES = 1 << 24

ModelArgument = Annotated[
    Path, typer.Argument(metavar="MODEL_FOLDER", help="A Hugging Face encoder with model.safetensors.")
]
TextOption = Annotated[
    Path, typer.Option("--text", metavar="FILE", help="UTF-8 text; its beginning is read.")
]
LayersOption = Annotated[
    str | None, typer.Option("--layers", metavar="N[,N…]", help="Layers to keep, from 0; all if left out.")
]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens to keep.")]
NameOption = Annotated[
    str | None, typer.Option("--name", help="What the file calls the model; the folder's name if left out.")
]
FileOption = Annotated[Path, typer.Option("--out", metavar="FILE.safetensors", help="A new file.")]


def capture_command(
    model_folder: ModelArgument,
    text: TextOption,
    out: FileOption,
    layers: LayersOption = None,
    max_tokens: MaxTokensOption = 512,
    name: NameOption = None,
) -> None:
    """Write q, k, v of an encoder on a text, with tokens and origin, for mse --inputs FILE.

    Example: efficient-attn capture MODEL --text alice.txt --layers 0,1,5 --out alice.safetensors
    """
    if out.suffix != ".safetensors":
        raise OptionError(f"--out is a file that ends in .safetensors, not {str(out)!r}.")
    if out.exists():
        raise DataError(f"--out: {out} exists already; name a new file.")
    chosen = _layers(layers)
    words = _read(text)

    from efficient_attn.integrations.capture import capture, save

    captured = capture(model_folder, words, layers=chosen, max_tokens=max_tokens, name=name)
    save(captured, out)
    kept = ", ".join(map(str, captured.layers))
    talk.say(
        f"Layers {kept} on {len(captured.tokens)} tokens. Measure on them: efficient-attn mse --inputs {out}"
    )
    typer.echo(str(out))


def _layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise OptionError(f"--layers is made of whole numbers, such as 0,1,5, not {text!r}.")
    return tuple(map(int, parts))


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise DataError(
                f"--text: {path} is larger than {_MOST_BYTES} bytes; cut it to what is to be read."
            )
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(f"--text: cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise DataError(f"--text: {path} is no UTF-8 text.") from None
