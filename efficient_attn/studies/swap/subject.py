"""The original model as a variant, and the backends of a variant by layer."""

from collections.abc import Mapping, Sequence
from typing import Any

from efficient_attn.measure.variants import OWN, Variant

# The model with its own attention.
OWN_ATTENTION = Variant(backend=OWN, label=OWN, target=OWN)


def choices(
    variant: Variant, layers: Sequence[int], layer: int | None = None
) -> Mapping[int, tuple[Any, Mapping[str, Any]]]:
    """Backend and options of each replaced layer: of all `layers`, or of one."""
    if isinstance(variant.target, Mapping):
        return variant.target
    return dict.fromkeys(layers if layer is None else (layer,), (variant.target, variant.options))
