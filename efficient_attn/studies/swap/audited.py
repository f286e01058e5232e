"""Audits of the attention inside a model: errors of random rows of every call, pooled by layer."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from efficient_attn.backend import Backend
from efficient_attn.measure.error import Sample, sample_rows
from efficient_attn.measure.variants import DENSE, YARDSTICK
from efficient_attn.studies.audit import estimates

# Samples of all calls of each layer.
Samples: TypeAlias = dict[int, list[Sample]]


@contextmanager
def audited(backends: Iterable[tuple[int, Backend]], samples: Samples) -> Iterator[None]:
    """Add a sample of every call within the block to the samples of its layer.

    Args:
        backends: Backends with the numbers of their layers; exact attention is left out.
    """
    hooks = [
        backend.register_forward_hook(partial(_sample, samples.setdefault(layer, [])), with_kwargs=True)
        for layer, backend in backends
        if backend.spec.name not in (YARDSTICK, DENSE)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def pooled(samples: Samples) -> dict[str, Any]:
    """Quantities of a record, with one entry per layer; none without samples.

    Heads of all calls are strata. A call draws rows of its own, so that errors of samples are independent
    and their variances add.
    """
    found = {layer: estimates(some)[1] for layer, some in sorted(samples.items()) if some}
    if not found:
        return {}
    values, low, high = zip(*found.values(), strict=True)
    return {
        "audited_layers": tuple(found),
        "attention_relative_error": values,
        "attention_relative_error_low": low,
        "attention_relative_error_high": high,
    }


def _sample(
    samples: list[Sample], backend: Any, args: tuple[Any, ...], named: Mapping[str, Any], output: Tensor
) -> None:
    given = dict(zip(("q", "k", "v"), args, strict=False)) | dict(named)
    inputs = (given["q"], given["k"], given["v"], given.get("key_mask"))
    # Every call has a seed of its own.
    samples += sample_rows(backend, inputs, output, rows=None, seed=len(samples))
