"""Former names of `operation_counts`, kept for one release."""

import warnings
from typing import Any

from efficient_attn import operation_counts

_NAMES = {
    "Step": "MatMul",
    "Work": "OperationCounts",
    "softmax_steps": "softmax_matmuls",
    "visible_pairs": "visible_pairs",
}


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = f"{operation_counts.__name__}.{_NAMES[name]}"
    warnings.warn(f"{__name__}.{name} is now {new}.", DeprecationWarning, stacklevel=2)
    return getattr(operation_counts, _NAMES[name])
