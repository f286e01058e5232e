"""Hugging Face transformers: backends attached, saved and used for generation."""

from efficient_attn.errors import MissingPackageError

try:
    import transformers as _transformers

    # Caches of earlier versions have other methods.
    if tuple(map(int, _transformers.__version__.split(".")[:2])) < (5, 14):
        raise ImportError
except ImportError:
    raise MissingPackageError(
        "This needs transformers, version 5.14 or later: pip install 'transformers>=5.14' tokenizers."
    ) from None

from efficient_attn.integrations.transformers.attachment import attach, distillation_loss, load, swapped
from efficient_attn.integrations.transformers.caches import StateCache
from efficient_attn.integrations.transformers.sites import ignored

__all__ = ["StateCache", "attach", "distillation_loss", "ignored", "load", "swapped"]
