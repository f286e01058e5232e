"""Model and text arguments of `capture` and `swap`."""

from pathlib import Path
from typing import Annotated

import typer

from efficient_attn.errors import DataError

# Largest text; a longer one is no single sequence.
_MOST_BYTES = 1 << 24

ModelArgument = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL_FOLDER", help="Folder of a Hugging Face model: config.json and safetensors."
    ),
]
NameOption = Annotated[
    str | None,
    typer.Option("--name", help="Name of the model in records and files; the folder's name if omitted."),
]


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        DataError: If it cannot be read, is not UTF-8, or is too long.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise DataError(
                f"--text: {path} is larger than {_MOST_BYTES} bytes; cut it to the part to be read."
            )
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(f"--text: cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise DataError(f"--text: {path} is no UTF-8 text.") from None
