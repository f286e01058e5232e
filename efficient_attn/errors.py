"""All errors that a user can cause, one class per kind."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Words of every refusal of causal attention.
NOT_CAUSAL = "cannot be causal"

# Names here, with names in other libraries that edit distance cannot match.
_ELSEWHERE = {
    "exact": "softmax sdpa scaled_dot_product_attention flash flash_attention vanilla full",
    "exact-dense": "math eager dense",
    "oracle-topk": "topk top-k",
    "bigbird": "longformer big-bird block-sparse random",
    "block-topk": "quest moba nsa",
    "window": "local local-attention natten sliding_window sliding-window window_size",
    "performer-positive": "favor favor+ performer positive",
    "performer-oprf": "favor++ oprf gerf",
    "performer-full": "favor# derf aderf sderf",
    "performer-hyperbolic": "hyp+ hyperbolic cosh",
    "linear-relu": "relu performer-relu",
    "linear-elu": "elu linear linear-transformer",
    "linear-taylor-2": "taylor based",
    "performer-trig": "rff rfa trig fourier",
    "num_features": "nb_features n_features num_random_features",
    "projection": "ortho ortho_features orthogonal",
    "rank": "k_dim dim_k",
    "max_tokens": "seq_len max_seq_len",
    "sharing": "share_kv one_kv_head",
    "causal": "is_causal",
    "key_mask": "attn_mask mask attention_mask key_padding_mask context_mask",
    "dropout": "dropout_p",
    "scale": "softmax_scale sm_scale scaling",
    "head_dim": "dim_head dim_heads",
    "num_heads": "heads n_heads nhead enable_gqa",
}

# Remarks on names whose meaning differs from other libraries.
_REMARKS = {
    "key_mask is bool [batch, k_tokens], True for a real token": "attn_mask mask attention_mask",
    "key_mask is True for a real token, the opposite of torch's key_padding_mask": "key_padding_mask",
    "causality is fixed when the backend is built: build(..., causal=True)": "is_causal causal",
    "it is fixed when 'exact' or 'exact-dense' is built": "dropout_p",
    "it is fixed when 'exact' or 'exact-dense' is built; no other backend has it": "dropout",
    "the scale is fixed when the backend is built: build(..., scale=...)": "scale",
    "grouped queries need no flag: give k and v fewer heads": "enable_gqa",
}


def _by_word(table: dict[str, str]) -> dict[str, str]:
    """{word: key} of a table that lists the words of each key."""
    return {word: key for key, words in table.items() for word in words.split()}


class AttentionError(Exception):
    """Base class of errors, whose messages state the request and a valid alternative."""


class ShapeError(AttentionError, ValueError):
    """A tensor has a wrong shape or is on the wrong device."""


class DtypeError(AttentionError, TypeError):
    """A tensor has a wrong dtype, or an argument a wrong type."""


class OptionError(AttentionError, ValueError):
    """A number or an option is out of range."""


class UnsupportedError(AttentionError, NotImplementedError):
    """The backend does not support the request."""


class CalibrationError(AttentionError, RuntimeError):
    """A backend that requires calibration was called without it."""


class DataError(AttentionError, ValueError):
    """A file cannot be read or written, or has invalid content."""


class MissingPackageError(AttentionError, ImportError):
    """A package is not installed. The message has the command that installs it."""


class IncompleteError(AttentionError, RuntimeError):
    """The budget of a run ended before a baseline and one candidate were measured.

    Attributes:
        results: Results measured until then.
        folder: Folder of the run, or None.
    """

    def __init__(self, message: str, *, results: Any, folder: Path | None) -> None:
        super().__init__(message)
        self.results, self.records, self.folder = results, results.records, folder


@contextmanager
def naming_missing(user: str) -> Iterator[None]:
    """Context that turns a failed import into an error that names the package and its `user`."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", __package__):
            raise
        raise MissingPackageError(
            f"{user} needs {package}, which is not installed: pip install {package}."
        ) from None


class UnknownNameError(AttentionError, ValueError):
    """Unknown name. The message suggests the nearest name."""

    def __init__(self, kind: str, name: str, choices: Iterable[str]) -> None:
        names = sorted(choices)
        message = f"No {kind} is called {name!r}."
        elsewhere = _by_word(_ELSEWHERE).get(name.lower())
        near = difflib.get_close_matches(name, names, n=1)
        if elsewhere in names:
            message += f" Called {elsewhere!r} in this package."
        elif near:
            message += f" Did you mean {near[0]!r}?"
        remark = _by_word(_REMARKS).get(name.lower())
        if remark is not None:
            message += f" ({remark[0].upper()}{remark[1:]}.)"
        super().__init__(f"{message} Known: {', '.join(names) or 'none'}.")
