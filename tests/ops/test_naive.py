"""Every backend computes its definition in `ops.naive`; tests/test_golden.py holds both to 50 digits."""

import pytest
import torch
from backend_definitions import by_definition
from reference import largest_difference, random_mask, random_qkv

import efficient_attn as ea

NAMES = [name for name in ea.list_backends() if name not in ("window-clusters", "block-topk")]
PATHS = pytest.mark.usefixtures("path")
CASES = [
    (name, causal)
    for name in NAMES
    for causal in (False, True)
    if ea.spec(name).capabilities.causal or not causal
]


def built(name, *, causal=False, **options):
    size = ea.spec(name).size_option
    sizes = {size: {"window": 5}.get(size, 6)} if size else {}
    shared = {"head_dim": 4, "num_heads": 4, "max_tokens": 9, "causal": causal}
    backend = ea.build(name, **{**shared, **sizes, **options}).double()
    if backend.needs_calibration:
        backend.calibrate(*random_qkv(1, 4, 2, 32, 32, 4, seed=9)[:2])
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
        ("window", {"global_tokens": 2}),
        ("linformer", {"sharing": "none"}),
        ("linformer", {"sharing": "key-value"}),
        ("linear-hedgehog", {"num_heads": None}),
        ("nystrom", {"landmarks": 4, "iterations": 2}),
    ],
)
def test_options_change_the_definition_alike(name, options):
    mask = random_mask(2, 9)
    backend = built(name, **options)
    assert difference(backend, *inputs(name, seed=2), mask) <= 1e-11
