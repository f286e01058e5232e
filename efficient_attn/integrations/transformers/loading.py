"""Models and tokenizers from local folders, without network access.

Weights are read from safetensors only. A pickle can run code when it is read, and a class from the folder
when it is used; both are refused.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from efficient_attn.errors import AttentionError, DataError, OptionError
from efficient_attn.integrations.transformers.attend import NAME
from efficient_attn.limits import CONFIG_BYTES, TOKENIZER_BYTES, check_header, read_bytes

_LONGEST_MESSAGE = 200

# Tokenizers denote "no limit" by a number of this magnitude.
_NO_LIMIT = 1 << 30

# Models have up to twice the tensors and numbers of their files, packed weights eight times the numbers.
_MOST_TIMES = 16

_LARGER = "{}/config.json describes a larger model than its safetensors hold."

# Numbers in configurations for which transformers makes lists before it makes a model.
_COUNTS = re.compile(r'(?:layer|num_labels)[^"]*"\s*:\s*(\d+)')

# Endings of files that tokenizers and configurations are read from.
_TEXTS = (".bpe", ".jinja", ".json", ".model", ".spm", ".tiktoken", ".txt", ".vocab")


class Opened(NamedTuple):
    """A model in eval mode, its tokenizer, and its name, class, hash and version of transformers."""

    model: PreTrainedModel
    tokenizer: Any
    about: dict[str, str]


def open_model(
    folder: str | Path, *, dtype: str | None = None, device: str = "cpu", tokens: int = 0
) -> Opened:
    """Load the model of a folder and its tokenizer.

    Args:
        dtype: Name of a dtype; None: the dtype of the checkpoint.
        tokens: Number of tokens that the model has to support.
    """
    path = Path(folder)
    weights = weight_files(path)
    config = read_config(path)
    # Weights may take minutes to read, so the positions are checked before.
    if tokens > (most := min(filter(None, _positions_of(config)), default=tokens)):
        raise OptionError(f"seq_len is at most the {most} positions of this model, not {tokens}.")
    if config._attn_implementation == NAME:
        raise DataError(f"{folder} holds a model with attached backends; use a folder without backends.")
    kind = model_class(config, path)
    with data_errors(f"Cannot load the tokenizer of {folder}"), _quiet():
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    model, _ = read_model(path, kind, dtype=getattr(torch, dtype) if dtype else "auto")
    digest = hashlib.sha256()
    for weight_file in weights:
        with weight_file.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    about = {
        "model": path.resolve().name,
        "class": kind.__name__,
        "weights_sha256": digest.hexdigest(),
        "transformers": transformers.__version__,
    }
    return Opened(model.to(device).eval(), tokenizer, about)


def token_ids(opened: Opened, text: str, *, most: int) -> Tensor:
    """First `most` tokens of a text, [1 tokens]."""
    with data_errors("The tokenizer cannot read this text"):
        ids = opened.tokenizer(text, truncation=True, max_length=most, return_tensors="pt")[
            "input_ids"
        ].long()
    rows = opened.model.get_input_embeddings().num_embeddings
    if ids.numel() and int(ids.max()) >= rows:
        raise DataError(f"The tokenizer has ids up to {int(ids.max())}, this model only {rows} embeddings.")
    return ids.to(opened.model.device)


def positions(opened: Opened) -> int | None:
    """Maximum sequence length of model and tokenizer, if they have any."""
    table = next(
        (m for name, m in opened.model.named_modules() if name.endswith("position_embeddings")), None
    )
    limits = [
        *_positions_of(opened.model.config),
        # If positions start after the padding index, the first rows of the table are unused.
        table.num_embeddings - table.padding_idx - 1
        if isinstance(table, nn.Embedding) and table.padding_idx is not None
        else None,
        getattr(opened.tokenizer, "model_max_length", None),
    ]
    return min((number for number in limits if number and number < _NO_LIMIT), default=None)


def _positions_of(config: Any) -> list[int | None]:
    return [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]


def read_config(path: Path) -> Any:
    with data_errors(f"Cannot load a model from {path}"):
        counts = _COUNTS.findall(read_bytes(path / "config.json", CONFIG_BYTES).decode())
        if max(map(int, counts), default=0) > _largest(path)[1]:
            raise DataError(_LARGER.format(path))
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def model_class(config: Any, path: Path) -> Any:
    names = config.architectures[:1] if isinstance(config.architectures, list) else []
    kind = getattr(transformers, str(*names), None)
    if isinstance(kind, type) and issubclass(kind, PreTrainedModel):
        return kind
    raise DataError(f"{path}/config.json names the class {config.architectures}, which transformers lacks.")


def read_model(path: Path, kind: Any, **arguments: Any) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """Load a model and transformers' report on its tensors.

    Missing tensors, which transformers would initialise randomly with a warning, are refused. A model that
    was saved without its optional pooler is loaded without it.
    """
    with data_errors(f"Cannot load a model from {path}"), _quiet(), _not_larger(path):
        model, report = kind.from_pretrained(
            path,
            **arguments,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    missing = set(report["missing_keys"])
    pooler = {name for name in model.state_dict() if name.startswith("pooler.")}
    if pooler and pooler <= missing and "add_pooling_layer" in signature(type(model)).parameters:
        model.pooler = None
        missing -= pooler
    refuse_tensors(path, "lacks", missing)
    refuse_tensors(path, "has in another shape", [str(entry[0]) for entry in report["mismatched_keys"]])
    return model, report


@contextmanager
def data_errors(what: str) -> Iterator[None]:
    """Convert any error of a library that reads files into a one-line DataError.

    A malformed file can make these libraries raise exceptions of any type.
    """
    try:
        yield
    except AttentionError:
        raise
    except Exception as error:
        raise DataError(f"{what}: {' '.join(str(error).split())[:_LONGEST_MESSAGE]}") from None


@contextmanager
def _not_larger(path: Path) -> Iterator[None]:
    """Refuse a model with far more tensors or numbers than its files, before it takes memory."""
    tensors, numbers = _largest(path)

    def add(module: nn.Module, name: str, parameter: Tensor) -> None:
        nonlocal tensors, numbers
        # transformers makes a model on meta, and then reads its tensors.
        if parameter.is_meta:
            tensors, numbers = tensors - 1, numbers - parameter.numel()
        if min(tensors, numbers) < 0:
            raise DataError(_LARGER.format(path))

    hook = register_module_parameter_registration_hook(add)
    try:
        yield
    finally:
        hook.remove()


def _largest(path: Path) -> tuple[int, int]:
    """Bounds on the tensors and numbers of a model, from the headers of its safetensors."""
    sizes = []
    for file in path.glob("model*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            sizes += [math.prod(opened.get_slice(name).get_shape()) for name in opened.keys()]  # noqa: SIM118
    return _MOST_TIMES * len(sizes), _MOST_TIMES * sum(sizes)


@contextmanager
def _quiet() -> Iterator[None]:
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


def refuse_tensors(path: Path, what: str, names: Any) -> None:
    """Refuse a folder that lacks tensors of the model, or has others."""
    if names:
        raise DataError(f"The safetensors of {path} belong to another model: it {what} {min(names)}.")


def weight_files(path: Path) -> list[Path]:
    """Paths of the safetensors of a model. Checks their headers and the size of its text files."""
    if not path.is_dir():
        raise DataError(
            f"{path} is not a folder. Models are read from local folders; download a model of the Hub by "
            "hf download NAME --local-dir FOLDER."
        )
    if not (path / "config.json").is_file():
        raise DataError(f"{path} holds no config.json; a model is a folder that save_pretrained wrote.")
    weights = sorted(path.glob("model*.safetensors"))
    if not weights:
        raise DataError(
            f"{path} holds no model.safetensors, which save_pretrained writes. Other formats are pickles, "
            "which can run code when they are read."
        )
    for file in weights:
        check_header(file)
    for file in path.iterdir():
        if file.suffix in _TEXTS and file.exists() and not file.is_dir():
            with data_errors(f"Cannot read {file}"):
                read_bytes(file, TOKENIZER_BYTES)
    return weights
