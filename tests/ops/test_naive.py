"""Every backend computes its definition in `ops.naive`; tests/test_golden.py holds both to 50 digits."""

import pytest
import torch
from backend_definitions import by_definition
from reference import largest_difference, random_mask, random_qkv
from small_backends import FORMS, small_backend

import efficient_attn as ea

PATHS = pytest.mark.usefixtures("path")
CASES = [form for form in FORMS if form[0] not in ("window-clusters", "block-topk")]


def built(name, *, causal=False, **options):
    size = 5 if ea.spec(name).size_option == "window" else 6
    shared = {"head_dim": 4, "num_heads": 4, "max_tokens": 9, "causal": causal}
    backend = small_backend(name, size, **{**shared, **options})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        # Learned maps and mixtures differ from head to head and from their start.
        for x in backend.parameters():
            x.add_(0.3 * torch.randn(x.shape, generator=generator, dtype=x.dtype))
    return backend


def inputs(name, *, seed=0):
    """Queries, keys and values; short, so that the sums of signed features are far from zero."""
    queries = 7 if ea.spec(name).capabilities.cross else 9
    q, k, v = random_qkv(2, 4, 2, queries, 9, head_dim=4, value_dim=3, seed=seed)
    return 0.3 * q, 0.3 * k, v


def difference(backend, q, k, v, key_mask):
    """Largest difference from the definition, of output and gradients of inputs and parameters."""
    if key_mask is not None:
        # A masked token may hold anything.
        k, v = (x.masked_fill(~key_mask[:, None, :, None], torch.nan) for x in (k, v))
    leaves = [*(x.requires_grad_() for x in (q, k, v)), *backend.parameters()]
    expected = by_definition(backend, q, k, v, key_mask=key_mask)
    return largest_difference(backend(q, k, v, key_mask=key_mask), expected, leaves)


@PATHS
@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(("name", "causal"), CASES)
def test_outputs_and_gradients_are_those_of_the_definition(name, causal, masked):
    mask = random_mask(2, 9) if masked else None
    if masked:
        mask[0] = False
    assert difference(built(name, causal=causal), *inputs(name), mask) <= 1e-11


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("linformer", {"sharing": "none"}),
        ("linformer", {"sharing": "key-value"}),
        ("linear-hedgehog", {"num_heads": None}),
        ("linear-taylor-1", {"scale": -30.0}),
        ("nystrom", {"landmarks": 4, "iterations": 2}),
    ],
)
def test_options_change_the_definition_alike(name, options):
    backend = built(name, **options)
    assert difference(backend, *inputs(name, seed=2), random_mask(2, 9)) <= 1e-11
