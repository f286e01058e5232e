"""The path of a GPU's fused attention on the CPU, in any dtype."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.attention import flex_attention

from efficient_attn.ops import paths, verdict
from efficient_attn.ops.linear import softmax_identity
from efficient_attn.ops.softmax import flex


def uncompiled_by_itself() -> AbstractContextManager[Any]:
    """A context in which FlexAttention does not compile itself."""
    if not hasattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"):
        pytest.skip("FlexAttention of this torch always compiles itself")
    return patch.object(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def _uncompiled(device: torch.device, dtype: torch.dtype, *sizes: int) -> Callable:
    everything = flex._everything(device)
    return lambda *inputs: flex._attention(*inputs, everything)


@contextmanager
def on_flex(*, multiprocessors: int = 8, least_keys: int = 8) -> Iterator[None]:
    """FlexAttention serves the CPU, as a device of some multiprocessors, with short parts of keys."""
    with (
        uncompiled_by_itself(),
        patch.object(paths, "kernels", lambda device, dtype: "flex"),
        patch.object(verdict, "trusted", lambda *kernel: True),
        patch.object(softmax_identity, "_multiprocessors", lambda device: multiprocessors),
        patch.object(softmax_identity, "_KEYS", least_keys),
    ):
        yield


@contextmanager
def eager_flex() -> Iterator[None]:
    """FlexAttention without compilation."""
    with on_flex(), patch.object(flex, "_compiled", _uncompiled):
        yield


@contextmanager
def traced_flex(*, operators: bool = False) -> Iterator[list[Any]]:
    """FlexAttention, compiled as far as its graphs, which are returned.

    Args:
        operators: Whether plain operators give the results. The graph itself, run uncompiled, maps over
            batches, which is impossible inside of other compiled code.
    """
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Callable:
        graphs.append(graph)
        return _by_operators if operators else graph.forward

    flex.compiled.cache_clear()
    with on_flex(), patch.object(torch, "compile", partial(torch.compile, backend=keep)):
        yield graphs
    flex.compiled.cache_clear()


def _by_operators(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, bias, factor = (x for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point())
    k, v, bias = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v, bias))
    scores = factor * q @ k.mT + bias.unsqueeze(-2)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)
