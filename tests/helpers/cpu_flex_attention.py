"""The path of a GPU's fused attention on the CPU, in any dtype."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.attention import flex_attention

from efficient_attn.backends import linear_attention
from efficient_attn.ops import paths, verdict
from efficient_attn.ops.linear import softmax_identity
from efficient_attn.ops.softmax import flex


@contextmanager
def on_flex() -> Iterator[None]:
    """FlexAttention serves the CPU, as a device of eight multiprocessors, with parts of eight keys."""
    # PyTorch has no public switch against compiling.
    switch, properties = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", SimpleNamespace(multi_processor_count=8)
    if not hasattr(flex_attention, switch):
        pytest.skip("FlexAttention of this torch always compiles itself")
    with (
        patch.object(flex_attention, switch, True),
        patch.object(paths, "flex_serves", lambda device, dtype: True),
        patch.object(verdict, "trusted", lambda *kernel: True),
        patch.object(torch.cuda, "get_device_properties", lambda device: properties),
        patch.object(softmax_identity, "LEAST_KEYS", 8),
        # Inputs of a GPU are transformed whole.
        patch.object(linear_attention, "tuned_for_cpu", lambda x: False),
    ):
        yield


@contextmanager
def eager_flex() -> Iterator[None]:
    """FlexAttention without compilation."""
    with on_flex(), patch.object(flex, "compiled", lambda function, *key: function):
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
