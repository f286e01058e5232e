"""Every backend computes its definition, and the definitions are those written out query by query."""

import pytest
import torch
from definitions import RANDOM, by_definition
from reference import largest_difference, random_mask, random_qkv, reference_attention, reference_linear

import efficient_attn as ea
from efficient_attn.ops import naive

NAMES = [name for name in ea.list_backends() if name != "window-clusters"]
PATHS = pytest.mark.usefixtures("path")
CASES = [
    (name, causal)
    for name in NAMES
    for causal in (False, True)
    if ea.spec(name).capabilities.causal or not causal
]


def built(name, *, causal=False, scale=None, **options):
    size = ea.spec(name).size_option
    sizes = {size: {"window": 5}.get(size, 6)} if size else {}
    shared = {"head_dim": 4, "num_heads": 4, "max_tokens": 9, "causal": causal, "scale": scale}
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
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("name", "causal"), CASES)
def test_outputs_and_gradients_are_those_of_the_definition(name, causal, masked):
    mask = random_mask(2, 9) if masked else None
    if masked:
        mask[0] = False
    assert difference(built(name, causal=causal), *inputs(name), mask) <= 1e-11


@pytest.mark.parametrize("scale", [1.0, -0.3])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "linformer"])
def test_a_scale_of_either_sign_multiplies_scores(name, scale):
    assert difference(built(name, scale=scale), *inputs(name), None) <= 1e-11


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("window", {"global_tokens": 2}),
        ("linformer", {"sharing": "none"}),
        ("linformer", {"sharing": "key-value"}),
        ("linear-hedgehog", {"num_heads": None}),
        ("linear-hedgehog", {"features": "exponential"}),
        ("performer-oprf", {"a": -0.1}),
    ],
)
def test_options_change_the_definition_alike(name, options):
    mask = random_mask(2, 9)
    backend = built(name, **options)
    assert difference(backend, *inputs(name, seed=2), mask) <= 1e-11


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_definitions_are_those_of_the_reference(causal, masked):
    q, k, v = inputs("exact")
    options = {"scale": 0.5, "causal": causal, "key_mask": random_mask(2, 9) if masked else None}
    # A masked token may hold anything.
    hidden = torch.full_like(k[:, :, :1], torch.nan)
    tensors = [
        x if not masked else x.where(options["key_mask"][:, None, :, None], hidden[..., :1]) for x in (k, v)
    ]
    expected = reference_attention(q, k, v, **options)
    assert (naive.softmax_attention(q, *tensors, **options) - expected).abs().max() <= 1e-14
    w = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for name, kind in (
        ("performer-positive", "positive"),
        ("performer-hyperbolic", "hyperbolic"),
        ("performer-trig", "trigonometric"),
    ):
        expected = reference_linear(q, k, v, w, kind, **options)
        actual = naive.linear_attention(q, *tensors, lambda x, name=name: RANDOM[name](x, w), **options)
        assert (actual - expected).abs().max() <= 1e-12
