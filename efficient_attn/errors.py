"""All errors that a user can cause, one class per kind."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

# Names in other libraries and here; edit distance cannot match these.
_ELSEWHERE = {
    "softmax": "exact",
    "sdpa": "exact",
    "scaled_dot_product_attention": "exact",
    "flash": "exact",
    "flash_attention": "exact",
    "vanilla": "exact",
    "full": "exact",
    "math": "exact-dense",
    "eager": "exact-dense",
    "dense": "exact-dense",
    "local": "window",
    "local-attention": "window",
    "natten": "window",
    "sliding_window": "window",
    "sliding-window": "window",
    "window_size": "window",
    "favor": "performer-positive",
    "favor+": "performer-positive",
    "performer": "performer-positive",
    "positive": "performer-positive",
    "favor++": "performer-oprf",
    "oprf": "performer-oprf",
    "gerf": "performer-oprf",
    "favor#": "performer-full",
    "derf": "performer-full",
    "aderf": "performer-full",
    "sderf": "performer-full",
    "hyp+": "performer-hyperbolic",
    "hyperbolic": "performer-hyperbolic",
    "cosh": "performer-hyperbolic",
    "relu": "linear-relu",
    "performer-relu": "linear-relu",
    "elu": "linear-elu",
    "linear": "linear-elu",
    "linear-transformer": "linear-elu",
    "taylor": "linear-taylor-2",
    "based": "linear-taylor-2",
    "rff": "performer-trig",
    "rfa": "performer-trig",
    "trig": "performer-trig",
    "fourier": "performer-trig",
    "nb_features": "num_features",
    "n_features": "num_features",
    "num_random_features": "num_features",
    "ortho": "projection",
    "ortho_features": "projection",
    "orthogonal": "projection",
    "k_dim": "rank",
    "dim_k": "rank",
    "seq_len": "max_tokens",
    "max_seq_len": "max_tokens",
    "share_kv": "sharing",
    "one_kv_head": "sharing",
    "is_causal": "causal",
    "attn_mask": "key_mask",
    "mask": "key_mask",
    "attention_mask": "key_mask",
    "key_padding_mask": "key_mask",
    "context_mask": "key_mask",
    "dropout_p": "dropout",
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "scaling": "scale",
    "dim_head": "head_dim",
    "dim_heads": "head_dim",
    "heads": "num_heads",
    "n_heads": "num_heads",
    "nhead": "num_heads",
    "enable_gqa": "num_heads",
}

# Remarks on names whose meaning differs from other libraries.
_REMARKS = {
    "attn_mask": "key_mask is bool [batch, k_tokens], True for a real token",
    "mask": "key_mask is bool [batch, k_tokens], True for a real token",
    "attention_mask": "key_mask is bool [batch, k_tokens], True for a real token",
    "key_padding_mask": "key_mask is True for a real token, the opposite of torch's key_padding_mask",
    "is_causal": "causality is fixed when the backend is built: build(..., causal=True)",
    "causal": "causality is fixed when the backend is built: build(..., causal=True)",
    "dropout_p": "it is fixed when 'exact' or 'exact-dense' is built",
    "dropout": "it is fixed when 'exact' or 'exact-dense' is built; no other backend has it",
    "scale": "the scale is fixed when the backend is built: build(..., scale=...)",
    "enable_gqa": "grouped queries need no flag: give k and v fewer heads",
}


class AttentionError(Exception):
    """Base class; messages state the request and a valid alternative."""


class ShapeError(AttentionError, ValueError):
    """A tensor has a wrong shape or is on the wrong device."""


class DtypeError(AttentionError, TypeError):
    """A tensor has a wrong dtype, or an argument a wrong type."""


class OptionError(AttentionError, ValueError):
    """A number or an option is out of range."""


class UnsupportedError(AttentionError, NotImplementedError):
    """The backend does not support the request."""


class CalibrationError(AttentionError, RuntimeError):
    """A backend that requires calibration was called before it."""


class DataError(AttentionError, ValueError):
    """A file cannot be read or written, or has invalid content."""


class MissingPackageError(AttentionError, ImportError):
    """A package is not installed; the message has the command that installs it."""


@contextmanager
def naming_missing(user: str) -> Iterator[None]:
    """Context in which the import of a package that is not installed is an error that names `user`.

    Raises:
        MissingPackageError: In place of a ModuleNotFoundError.
    """
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
    """Unknown name; the message suggests the nearest known name."""

    def __init__(self, kind: str, name: str, choices: Iterable[str]) -> None:
        names = sorted(choices)
        message = f"No {kind} is called {name!r}."
        elsewhere = _ELSEWHERE.get(name.lower())
        near = difflib.get_close_matches(name, names, n=1)
        if elsewhere in names:
            message += f" Here it is {elsewhere!r}."
        elif near:
            message += f" Did you mean {near[0]!r}?"
        remark = _REMARKS.get(name.lower())
        if remark is not None:
            message += f" ({remark[0].upper()}{remark[1:]}.)"
        super().__init__(f"{message} Known: {', '.join(names) or 'none'}.")
