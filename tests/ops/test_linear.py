"""Linear attention is the quadratic formula to rounding, whatever the norms, the order and the chunks."""

import math
from functools import partial

import pytest
import torch
from definitions import by_definition
from reference import (
    assert_near,
    output_and_gradients,
    random_mask,
    random_qkv,
    reference_condition,
    reference_linear,
    relative_error,
)

import efficient_attn as ea
from efficient_attn.measure.memory import peak
from efficient_attn.ops import naive
from efficient_attn.ops import paths as device_paths
from efficient_attn.ops.linear import (
    causal_exponential,
    scaled_chunks,
    softmax_identity,
    trigonometric,
    weak_chunks,
)
from efficient_attn.ops.linear import full as linear_full
from efficient_attn.ops.linear import inputs as linear_inputs
from efficient_attn.ops.linear.features import draw_directions
from efficient_attn.ops.linear.inputs import LinearInputs
from efficient_attn.ops.linear.state import merge, query_weights, read, summarise
from efficient_attn.ops.paths import VARIABLE
from efficient_attn.ops.softmax import cpu_flash

KINDS = {
    "performer-positive": "positive",
    "performer-hyperbolic": "hyperbolic",
    "performer-trig": "trigonometric",
}
BOTH = pytest.mark.parametrize("name", KINDS)
CAUSAL = pytest.mark.parametrize("causal", [False, True])


def performer(name, *, head_dim=8, causal=False, num_features=32, **options):
    return ea.build(name, head_dim=head_dim, causal=causal, num_features=num_features, **options)


def reference(backend, q, k, v, **options):
    directions = backend.core.features.projection
    kind = backend.core.features.kind
    return reference_linear(
        q, k, v, directions, kind, scale=backend.problem.factor, causal=backend.problem.causal, **options
    )


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of a few tokens, so that short sequences have many."""

    def set_chunks(tokens):
        # At most this many tokens, whatever a cache holds.
        monkeypatch.setattr(linear_inputs, "_LEAST", 1)
        monkeypatch.setattr(linear_inputs, "_MOST", tokens)
        monkeypatch.setattr(softmax_identity, "_PIECE", tokens)
        monkeypatch.setattr(trigonometric, "_PIECE", tokens)
        monkeypatch.setattr(scaled_chunks, "CHUNK", tokens)
        monkeypatch.setattr(scaled_chunks, "_LARGE_CHUNK", tokens)
        monkeypatch.setattr(scaled_chunks, "_MULTIPLE", 1)
        # Two chunks in a segment of 32 features of 2 times 4 heads.
        for module, name in ((scaled_chunks, "_CACHED"), (device_paths, "HELD")):
            monkeypatch.setattr(module, name, 2 * tokens * 2 * 4 * 32)
        monkeypatch.setattr(causal_exponential, "CHUNK", tokens)
        monkeypatch.setattr(causal_exponential, "BACKWARD_CHUNK", tokens)

    return set_chunks


@pytest.fixture
def kernel(request, monkeypatch):
    """The fused kernel of the CPU, a PyTorch without it, or the path of other devices."""
    if request.param == "unfused":
        monkeypatch.setattr(cpu_flash, "_FORWARD", None)
    if request.param == "other":
        monkeypatch.setenv(VARIABLE, "torch")


def paths(names):
    """Every algorithm of these backends; only full attention by exponentials uses the fused kernel."""
    unfused = [("unfused", name, False) for name in names if name != "performer-trig"]
    cases = [
        (kernel, name, causal) for kernel in ("fused", "other") for name in names for causal in (False, True)
    ]
    cases += unfused
    ids = ["-".join(map(str, path)) for path in cases]
    return pytest.mark.parametrize(("kernel", "name", "causal"), cases, ids=ids, indirect=["kernel"])


EVERY_PATH = paths(KINDS)


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
@pytest.mark.parametrize("masked", [False, True])
@EVERY_PATH
def test_every_chunk_size_gives_the_outputs_and_gradients_of_the_definition(
    name, causal, masked, chunk, small_chunks, kernel
):
    small_chunks(chunk)
    q, k, v = random_qkv(q_tokens=16 if causal else 20, k_tokens=32)
    # Sums of signed features are near zero for longer vectors.
    norm = 0.5 if name == "performer-trig" else 1.0
    inputs = [x.requires_grad_() for x in (q * norm, k * norm, v)]
    mask = random_mask(2, 32) if masked else None
    if masked:
        # The first causal rows of an entry see no key.
        mask[-1, :18] = False
    backend = performer(name, causal=causal)
    actual, expected = (
        output_and_gradients(partial(call, key_mask=mask), inputs)
        for call in (backend, partial(by_definition, backend))
    )
    # Signed sums lose digits by cancellation; at this norm at most a few thousand times rounding.
    assert relative_error(actual[0].detach(), expected[0].detach()) <= 1e-12
    # Relative to the largest derivative: trigonometric rows near a zero sum dominate.
    assert_near(actual, expected, 1e-10)


ORDERS = {
    "norm 1": (1, slice(0, 0)),
    "norm 5": (5, slice(0, 0)),
    "norm 20": (20, slice(0, 0)),
    "norm 20, long keys first": (20, slice(107, None)),
    "norm 20, long keys last": (20, slice(0, 107)),
    "norm 20, interleaved": (20, slice(1, None, 2)),
}


@pytest.mark.parametrize("order", ORDERS)
@EVERY_PATH
def test_float32_keeps_to_the_formula_at_large_norms_in_every_order(name, causal, order, kernel):
    norm, short = ORDERS[order]
    q, k, v = random_qkv(1, 1, 1, 200, 200, head_dim=16)
    k[..., short, :] /= 20
    q, k, v = (q * norm).float(), (k * norm).float(), v.float()
    backend = performer(name, head_dim=16, causal=causal, num_features=64)
    out = backend(q, k, v)
    assert out.isfinite().all()
    condition = reference_condition(
        q,
        k,
        backend.core.features.projection,
        backend.core.features.kind,
        scale=backend.problem.factor,
        causal=causal,
    ).squeeze(-1)
    # Exponents of some size E are rounded to E · 6e-8, which is a relative error of the weights.
    largest = (q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max() * 16**-0.5).item()
    directions = backend.core.features.projection.double().norm(dim=-1).max().item()
    exponent = max(largest, directions * (norm * 8 / 2 + norm * 8 / 2)) + 1
    allowed = 8 * exponent * torch.finfo(torch.float32).eps * condition
    expected = reference(backend, q, k, v)
    absolute = (out.double() - expected).norm(dim=-1)
    assert (absolute <= allowed * v.double().norm(dim=-1).max()).all()


@pytest.mark.parametrize("norm", [1, 5, 20])
def test_denominators_of_positive_features_are_at_least_one(norm):
    q, k, v = (x.float() * norm for x in random_qkv(1, 2, 2, 50, 60, head_dim=16))
    tokens = LinearInputs(
        q, k, v, None, draw_directions("orthogonal", 64, 16, seed=0), None, "positive", 0.25
    )
    state = linear_full.whole_state(tokens)
    part = slice(0, 50)
    weights, _ = query_weights(tokens.query_features(tokens.query_rows(part)), state.log_scale)
    # One rounding of the sum may take an epsilon away.
    assert ((weights @ state.sums)[..., -1] >= 1 - torch.finfo(torch.float32).eps).all()


@BOTH
def test_states_merge_in_any_grouping(name):
    q, k, v = random_qkv(1, 2, 2, 6, 9)
    tokens = LinearInputs(q, k, v, None, draw_directions("iid", 16, 8, seed=0), None, KINDS[name], 0.1)
    a, b, c = (
        summarise(tokens.key_features(tokens.key_rows(part), part), tokens.real_rows(tokens.v, part))
        for part in (slice(0, 2), slice(2, 3), slice(3, 9))
    )
    queries = tokens.query_features(tokens.query_rows(slice(0, 6)))
    whole = read(linear_full.whole_state(tokens), queries)
    for state in (merge(merge(a, b), c), merge(a, merge(b, c)), merge(merge(c, a), b)):
        assert relative_error(read(state, queries), whole) < 1e-13


@CAUSAL
def test_trigonometric_denominators_are_what_the_estimator_says(causal):
    q, k, _ = random_qkv(1, 2, 1, 6, 9)
    mask = random_mask(1, 9)
    backend = performer("performer-trig", causal=causal, num_features=8)
    directions, root = backend.core.features.projection.double(), math.sqrt(backend.problem.factor)
    x, y = q.unsqueeze(-2) * root, k.unsqueeze(-3) * root
    visible = naive.visible_keys(q, k, causal=causal, key_mask=mask)
    sizes = (y.square().sum(dim=-1) / 2).masked_fill(~visible, -torch.inf)
    largest = sizes.amax(dim=-1, keepdim=True).clamp_min(0.0)
    weights = torch.cos((x - y) @ directions.mT).mean(dim=-1) * (sizes - largest).exp()
    denominators = backend.denominators(q, k, key_mask=mask)
    torch.testing.assert_close(denominators, weights.sum(dim=-1), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("path", ["", "torch"])
def test_rows_with_a_negative_denominator_are_neither_hidden_nor_clamped(path, monkeypatch):
    monkeypatch.setenv(VARIABLE, path)
    inputs = [(x * 3).requires_grad_() for x in random_qkv(1, 2, 2, 64, 64)]
    backend = performer("performer-trig", num_features=8)
    negative = (backend.denominators(*inputs[:2]) <= 0).detach()
    assert 0 < negative.sum() < negative.numel()
    outputs = backend(*inputs)[negative], by_definition(backend, *inputs)[negative]
    assert relative_error(*(out.detach() for out in outputs)) < 1e-9
    for left, right in zip(*(torch.autograd.grad(out.sum(), inputs) for out in outputs), strict=True):
        assert relative_error(left, right) < 1e-8


@pytest.fixture(params=["cpu", "other"])
def few_features(request, monkeypatch):
    """The path of the CPU, or of other devices with few features held at a time."""
    monkeypatch.setenv(VARIABLE, "torch" if request.param == "other" else "")
    monkeypatch.setattr(device_paths, "HELD", 2**17)
    monkeypatch.setattr(weak_chunks, "_FEATURES", 2**14)


@CAUSAL
@BOTH
def test_memory_beyond_the_output_does_not_grow_with_the_sequence(name, causal, few_features):
    backend = performer(name, head_dim=16, causal=causal, num_features=64)
    beyond = []
    for tokens in (2048, 4096):
        q = torch.randn(1, 2, tokens, 16)
        with torch.no_grad():
            used = peak(lambda q=q: backend(q, q, q), device="cpu").peak_bytes
        # Output, and for the backward pass a logarithm and a sign of each row's sum.
        beyond.append(used - 2 * tokens * (16 * 4 + 4 + 1))
    assert beyond[1] <= beyond[0] * 1.01 + 4096


@CAUSAL
@BOTH
def test_training_keeps_no_features(name, causal, few_features):
    backend = performer(name, head_dim=16, causal=causal, num_features=256)
    peaks = []
    for tokens in (1024, 2048):
        x = [torch.randn(1, 1, tokens, 16, requires_grad=True) for _ in range(3)]
        peaks.append(peak(lambda x=x: torch.autograd.grad(backend(*x).sum(), x), device="cpu").peak_bytes)
    # Queries' and keys' features of 1024 more tokens would take 2 · 1024 · 256 · 4 bytes = 2 MiB. The
    # output, its gradient and those of q, k and v take five rows of 16, the sums a few numbers more.
    assert peaks[1] - peaks[0] < 1024 * 4 * (5 * 16 + 16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_projections_stay_wide(dtype):
    backend = performer("performer-positive")
    before = backend.core.features.projection.clone()
    assert torch.equal(backend.to(dtype).core.features.projection, before)


@BOTH
def test_redraw_is_an_explicit_act_and_equals_building_with_that_seed(name):
    backend, second = performer(name).double(), performer(name, seed=3).double()
    q, k, v = random_qkv()
    before = backend(q, k, v)
    assert torch.equal(before, backend.train()(q, k, v))
    backend.redraw(3)
    assert torch.equal(backend(q, k, v), second(q, k, v))
    assert not torch.equal(backend(q, k, v), before)
