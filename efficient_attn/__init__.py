"""Efficient attention backends for PyTorch, with measurements of their error, time and memory.

Public names are resolved on first use, so that importing the package imports nothing else.
"""

import importlib
import os

# Type checkers take this name for True. `typing` and `pathlib` would take most of the import time.
TYPE_CHECKING = False

# Public names by the module that defines them.
_NAMES = {
    "backend": "Backend calibrate",
    "backends": "attention build list_backends spec",
    "external": "register",
    "errors": "AttentionError CalibrationError DataError DtypeError IncompleteError MissingPackageError "
    "OptionError ShapeError UnknownNameError UnsupportedError",
    "integrations.attach": "attach",
    "measure.inputs": "sample",
    "problem": "AttentionProblem",
    "registry": "BackendSpec Capabilities NoOptions",
    "runs.registry": "records_schema",
    "tools.audit": "audit",
    "tools.diff": "diff",
    "tools.gpu_check": "gpu_check",
    "runs.results": "Results read",
    "tools.show": "show",
    "testing": "check",
    "transformer.block": "BlockOptions TransformerBlock",
    "transformer.language_model": "LanguageModel generate",
    "transformer.layer": "AttentionLayer",
    "transformer.stack": "Decoder Encoder Transformer",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

_MODULES = {"testing": "testing", "intercept": "integrations.intercept", "distributed": "distributed"}

# Every file and every folder of `studies` is a function here.
_FOLDER = os.path.join(os.path.dirname(__file__), "studies")
_STUDIES = [name.removesuffix(".py") for name in os.listdir(_FOLDER) if not name.startswith("_")]

__all__ = sorted([*_HOME, *_MODULES, *_STUDIES])

if TYPE_CHECKING:
    from typing import Any

    __version__: str
    from efficient_attn import distributed as distributed
    from efficient_attn import testing as testing
    from efficient_attn.backend import Backend as Backend
    from efficient_attn.backend import calibrate as calibrate
    from efficient_attn.backends import attention as attention
    from efficient_attn.backends import build as build
    from efficient_attn.backends import list_backends as list_backends
    from efficient_attn.backends import spec as spec
    from efficient_attn.external import register as register
    from efficient_attn.integrations import intercept as intercept
    from efficient_attn.integrations.attach import attach as attach
    from efficient_attn.registry import BackendSpec as BackendSpec
    from efficient_attn.registry import Capabilities as Capabilities
    from efficient_attn.registry import NoOptions as NoOptions
    from efficient_attn.testing import check as check
    from efficient_attn.transformer.block import BlockOptions as BlockOptions
    from efficient_attn.transformer.block import TransformerBlock as TransformerBlock
    from efficient_attn.transformer.language_model import LanguageModel as LanguageModel
    from efficient_attn.transformer.language_model import generate as generate
    from efficient_attn.transformer.layer import AttentionLayer as AttentionLayer
    from efficient_attn.transformer.stack import Decoder as Decoder
    from efficient_attn.transformer.stack import Encoder as Encoder
    from efficient_attn.transformer.stack import Transformer as Transformer


def __getattr__(name: str) -> "Any":
    if name not in __all__ and name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from efficient_attn.errors import naming_missing

    with naming_missing(f"efficient_attn.{name}"):
        value = _resolved(name)
    globals()[name] = value
    return value


def _resolved(name: str) -> "Any":
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{_MODULES[name]}")
    if name in _STUDIES:
        study = importlib.import_module(f"{__name__}.runs.registry").find(name)
        return importlib.import_module(f"{__name__}.runs.run").python_function(study)
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    from importlib import metadata

    try:
        return metadata.version("efficient-attn")
    except metadata.PackageNotFoundError:
        # A bare checkout.
        return "unknown"


def __dir__() -> list[str]:
    return __all__
