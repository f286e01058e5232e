"""Calls of PyTorch's operators in a call of few tokens, whose time they are."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import efficient_attn as ea

# Most calls, those inside the package's operators included, of 64 tokens by backend and causality.
MOST = {
    ("exact", False): 1,
    ("exact", True): 1,
    ("linformer", False): 49,
    ("performer-positive", False): 20,
    ("performer-positive", True): 82,
    ("performer-trig", True): 123,
    ("linear-elu", False): 34,
    ("linear-elu", True): 82,
    ("linear-relu", True): 102,
}


def operator_calls(call):
    """Names of the operators that a call runs, without those that these call."""
    call()
    # Without an accelerator the profiler warns of missing activities unless it is told which to record.
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        call()
    names = []
    for event in profiler.events():
        parent = event.cpu_parent
        while parent is not None and not parent.name.startswith("aten::"):
            parent = parent.cpu_parent
        if parent is None and event.name.startswith("aten::"):
            names.append(event.name)
    return names


@pytest.mark.parametrize(("name", "causal"), MOST)
@torch.no_grad()
def test_a_short_call_has_few_operators(name, causal):
    options = {"rank": 64} if name == "linformer" else {}
    backend = ea.build(name, head_dim=64, num_heads=8, causal=causal, max_tokens=64, **options)
    q, k, v = torch.randn(3, 1, 8, 64, 64).unbind()
    names = operator_calls(lambda: backend(q, k, v))
    assert 0 < len(names) <= MOST[name, causal], names
