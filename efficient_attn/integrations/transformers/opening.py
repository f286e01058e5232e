"""A model and its tokenizer from a local folder: nothing is fetched, and none of its code is run.

Weights are read from safetensors alone. A pickle can run code when it is read, a class from the folder when
it is used; both are refused.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PreTrainedModel

from efficient_attn.errors import AttentionError, DataError, OptionError
from efficient_attn.integrations.transformers.attend import NAME
from efficient_attn.limits import CONFIG_BYTES, read_bytes
from efficient_attn.tensor_headers import check_header

_READ_BYTES = 1 << 20
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.h5", "*.msgpack")
_LONGEST_MESSAGE = 200

# The word for "no limit" that tokenizers have is a number of this size.
_NO_LIMIT = 1 << 30


class Opened(NamedTuple):
    """A model in eval mode, its tokenizer, and what tells it from other models.

    Attributes:
        about: Name, class, hash of the weights, version of transformers.
    """

    model: PreTrainedModel
    tokenizer: Any
    about: dict[str, str]


def open_model(
    folder: str | Path, *, dtype: str = "float32", device: str = "cpu", name: str | None = None
) -> Opened:
    """The model of a folder in the class that it was saved from, and its tokenizer.

    Args:
        name: What the model is called; None: as the folder is.

    Raises:
        DataError: If the folder holds no such model, or one that can only be read by running code.
    """
    path = Path(folder)
    weights = _weights(path)
    with told(f"Cannot load a model from {folder}"):
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    if config._attn_implementation == NAME:
        raise DataError(f"{folder} holds a model with backends attached; give the folder of one without.")
    kind = model_class(config, path)
    with told(f"Cannot load the tokenizer of {folder}"), quiet():
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    with told(f"Cannot load a model from {folder}"), quiet():
        model, found = kind.from_pretrained(
            path,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    check_complete(path, found)
    about = {
        "model": name or path.resolve().name,
        "class": kind.__name__,
        "weights_sha256": _digest(weights),
        "transformers": transformers.__version__,
    }
    return Opened(model.to(device).eval(), tokenizer, about)


def token_ids(opened: Opened, text: str, *, most: int) -> Tensor:
    """The first `most` tokens of a text, special ones included, [1 tokens] on the model's device.

    Raises:
        DataError: If the tokenizer cannot read it, or belongs to another model.
    """
    with told("The tokenizer cannot read this text"):
        ids = opened.tokenizer(text, truncation=True, max_length=most, return_tensors="pt")[
            "input_ids"
        ].long()
    rows = opened.model.get_input_embeddings().num_embeddings
    if ids.numel() and int(ids.max()) >= rows:
        raise DataError(f"The tokenizer counts to {int(ids.max())}, and this model knows {rows} tokens.")
    return ids.to(opened.model.device)


def positions(opened: Opened) -> int | None:
    """The longest sequence that the model and its tokenizer are made for; None where neither says."""
    table = next(
        (m for name, m in opened.model.named_modules() if name.endswith("position_embeddings")), None
    )
    known = [
        getattr(opened.model.config, "max_position_embeddings", None),
        getattr(opened.model.config, "n_positions", None),
        # Where positions begin behind that of padding, the first rows of the table are no positions.
        table.num_embeddings - table.padding_idx - 1
        if isinstance(table, nn.Embedding) and table.padding_idx is not None
        else None,
        getattr(opened.tokenizer, "model_max_length", None),
    ]
    return min((number for number in known if number and number < _NO_LIMIT), default=None)


def check_length(opened: Opened, tokens: int, *, name: str) -> None:
    """Refuse more tokens than there are positions; the message calls the argument `name`."""
    most = positions(opened)
    if most is not None and tokens > most:
        raise OptionError(f"{name} is at most the {most} positions of this model, not {tokens}.")


def model_class(config: Any, path: Path) -> Any:
    """The class that was saved, if it is one of transformers' models."""
    named = config.architectures[:1] if isinstance(config.architectures, list) else []
    kind = getattr(transformers, str(*named), None)
    if isinstance(kind, type) and issubclass(kind, PreTrainedModel):
        return kind
    raise DataError(f"{path}/config.json names the class {config.architectures}, which transformers has not.")


def check_complete(path: Path, found: Mapping[str, Any]) -> None:
    """Refuse what transformers would fill with random numbers, with a warning."""
    _check(path, "lacks", found["missing_keys"])
    _check(path, "has in another shape", [str(entry[0]) for entry in found["mismatched_keys"]])


def check_nothing_else(path: Path, found: Mapping[str, Any], ours: str) -> None:
    """Refuse what transformers would leave out with a warning, but for names that contain `ours`."""
    _check(path, "has, beyond the model,", [name for name in found["unexpected_keys"] if ours not in name])


@contextmanager
def told(what: str) -> Iterator[None]:
    """The errors of the libraries that read files, in one line of ours.

    What a file can make them raise is any exception: they check types, and some of it not at all.
    """
    try:
        yield
    except AttentionError:
        raise
    except Exception as error:
        raise DataError(f"{what}: {' '.join(str(error).split())[:_LONGEST_MESSAGE]}") from None


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' bars and its report of tensors left over: what is wrong is said afterwards."""
    level = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()


def _check(path: Path, what: str, names: Any) -> None:
    if names:
        raise DataError(f"The safetensors of {path} are of another model: it {what} {min(names)}.")


def _weights(path: Path) -> list[Path]:
    """The files of the weights, after a look at what else could be meant."""
    if not path.is_dir():
        raise DataError(
            f"{path} is no folder. Models are read from local folders; one of the Hub is brought there by "
            "hf download NAME --local-dir FOLDER."
        )
    if not (path / "config.json").is_file():
        raise DataError(f"{path} holds no config.json; a model is a folder that save_pretrained wrote.")
    check_config(path)
    weights = sorted(path.glob("model*.safetensors"))
    if weights:
        for file in weights:
            check_header(file)
        return weights
    others = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if others:
        raise DataError(
            f"{path} holds its weights as {others[0]} and no model.safetensors. Reading a pickle can run "
            "code, so only safetensors are read; save_pretrained writes them."
        )
    raise DataError(f"{path} holds no model.safetensors.")


def check_config(path: Path) -> None:
    """Refuse a configuration that asks for classes from the folder, which transformers does not know."""
    file = path / "config.json"
    with told(f"Cannot read {file}"):
        config = json.loads(read_bytes(file, CONFIG_BYTES))
    if not isinstance(config, dict):
        raise DataError(f"{file} is no JSON object.")
    kind = config.get("model_type")
    if config.get("auto_map") and kind not in CONFIG_MAPPING:
        raise DataError(
            f"{path} needs code of its own (auto_map in config.json), and no code of a model is run; models "
            "whose classes transformers has work."
        )


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
    return digest.hexdigest()
