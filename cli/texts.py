"""The model and the texts that `capture` and `swap` read."""

from pathlib import Path
from typing import Annotated

import typer

from efficient_attn.errors import DataError

# A text of more bytes than this is no text for one sequence.
_MOST_BYTES = 1 << 24

ModelArgument = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL_FOLDER", help="A folder of Hugging Face transformers: config.json and safetensors."
    ),
]
NameOption = Annotated[
    str | None,
    typer.Option("--name", help="What files call the model; the folder's name if left out."),
]


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        DataError: If it cannot be read, is no UTF-8, or is longer than any sequence.
    """
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
