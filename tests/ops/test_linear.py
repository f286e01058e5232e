"""Linear attention is the quadratic formula to rounding, whatever the norms, the order and the chunks."""

import math
from functools import partial
from itertools import product

import pytest
import torch
from backend_definitions import by_definition
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
from efficient_attn.ops.linear import inputs as linear_inputs
from efficient_attn.ops.linear import state as linear_state
from efficient_attn.ops.paths import VARIABLE
from efficient_attn.ops.softmax import cpu_flash

EXPONENTIAL = ("performer-positive", "performer-hyperbolic")
PERFORMERS = (*EXPONENTIAL, "performer-trig")
CAUSAL = pytest.mark.parametrize("causal", [False, True])
SLOW = pytest.mark.slow
CHUNKS = [(8, False), (8, True), *(pytest.param(n, False, marks=SLOW) for n in (1, 64))]
SHORT = {"long keys last": slice(107), "long keys first": slice(107, None), "interleaved": slice(1, None, 2)}


def performer(name, *, head_dim=8, causal=False, num_features=32, **options):
    return ea.build(name, head_dim=head_dim, causal=causal, num_features=num_features, **options)


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of a few tokens, so that short sequences have many."""

    def set_chunks(tokens, num_features):
        # At most this many tokens, whatever a cache holds.
        monkeypatch.setattr(linear_inputs, "SHORTEST_CHUNK", 1)
        monkeypatch.setattr(linear_inputs, "LONGEST_CHUNK", tokens)
        for module in (softmax_identity, trigonometric):
            monkeypatch.setattr(module, "CHUNK", tokens)
        for constant in ("CHUNK", "LARGE_CHUNK"):
            monkeypatch.setattr(scaled_chunks, constant, tokens)
        monkeypatch.setattr(scaled_chunks, "MULTIPLE", max(tokens // 2, 1))
        for constant in ("CHUNK", "BACKWARD_CHUNK"):
            monkeypatch.setattr(causal_exponential, constant, tokens)
        # Four chunks in a segment of 2 times 4 heads.
        for module, constant in ((scaled_chunks, "CACHED"), (device_paths, "HELD")):
            monkeypatch.setattr(module, constant, 4 * tokens * 2 * 4 * num_features)
        monkeypatch.setattr(weak_chunks, "BLOCK", 2)

    return set_chunks


@pytest.fixture
def kernel(request, monkeypatch):
    """The fused kernel of the CPU, a PyTorch without it, or the path of other devices."""
    if request.param == "unfused":
        monkeypatch.setattr(cpu_flash, "available", lambda *tensors: False)
    if request.param == "other":
        monkeypatch.setenv(VARIABLE, "torch")


def every_path(names):
    """Every algorithm of these backends; only full attention by exponentials uses the fused kernel."""
    cases = [*product(("fused", "other"), names, (False, True)), *product(["unfused"], EXPONENTIAL, [False])]
    ids = ["-".join(map(str, case)) for case in cases]
    return pytest.mark.parametrize(("kernel", "name", "causal"), cases, ids=ids, indirect=["kernel"])


@pytest.mark.parametrize(("chunk", "weak"), CHUNKS)
@pytest.mark.parametrize("masked", [False, True])
@every_path([*PERFORMERS, "linear-relu", "linear-elu"])
def test_every_chunk_size_gives_the_outputs_and_gradients_of_the_definition(
    name, causal, masked, chunk, weak, small_chunks, kernel, monkeypatch
):
    sizes = {} if name == "linear-elu" else {"num_features": 32}
    backend = ea.build(name, head_dim=8, causal=causal, scale=-0.3 if masked else None, **sizes).double()
    # The last of the chunks of 8 has one token.
    q, k, v = random_qkv(q_tokens=49, k_tokens=57)
    # Sums of signed features are near zero for longer vectors.
    norm = 0.5 if name == "performer-trig" else 1.0
    inputs = [x.requires_grad_() for x in (q * norm, k * norm, v)]
    small_chunks(chunk, backend.core.inputs(*inputs, None).num_features)
    if weak:
        # Every row of exponential features is weak.
        monkeypatch.setitem(weak_chunks._WEAK, torch.float64, 1e4)
        monkeypatch.setitem(linear_state.TINY, torch.float64, torch.inf)
    mask = random_mask(2, 57) if masked else None
    if masked:
        # No key is visible to the first causal rows of an entry, of several chunks.
        mask[-1, :34] = False
    actual = output_and_gradients(partial(backend, key_mask=mask), inputs)
    expected = output_and_gradients(partial(by_definition, backend, key_mask=mask), inputs)
    # Relative to the largest number: signed rows near a zero sum dominate, whose digits cancel.
    assert_near(actual, expected, 1e-10)


@pytest.mark.parametrize("short", SHORT)
@every_path(PERFORMERS)
def test_float32_keeps_to_the_formula_at_large_norms_in_every_order(name, causal, short, kernel):
    norm = 20
    q, k, v = random_qkv(1, 1, 1, 200, 200, head_dim=16)
    k[..., SHORT[short], :] /= 20
    q, k, v = (q * norm).float(), (k * norm).float(), v.float()
    backend = performer(name, head_dim=16, causal=causal, num_features=64)
    out = backend(q, k, v)
    assert out.isfinite().all()
    features = backend.core.features.projection, backend.core.features.kind
    options = {"scale": backend.problem.factor, "causal": causal}
    condition = reference_condition(q, k, *features, **options).squeeze(-1)
    # Exponents of some size E are rounded to E · 6e-8, which is a relative error of the weights.
    largest = (q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max() * 16**-0.5).item()
    directions = backend.core.features.projection.double().norm(dim=-1).max().item()
    exponent = max(largest, 8 * norm * directions) + 1
    allowed = 8 * exponent * torch.finfo(torch.float32).eps * condition
    absolute = (out.double() - reference_linear(q, k, v, *features, **options)).norm(dim=-1)
    assert (absolute <= allowed * v.double().norm(dim=-1).max()).all()


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


@CAUSAL
@pytest.mark.parametrize("path", ["", "torch"])
@pytest.mark.parametrize("name", [PERFORMERS[0], *(pytest.param(x, marks=SLOW) for x in PERFORMERS[1:])])
def test_training_keeps_no_features(name, path, causal, monkeypatch):
    monkeypatch.setenv(VARIABLE, path)
    # Other devices hold few features at a time.
    monkeypatch.setattr(device_paths, "HELD", 2**17)
    monkeypatch.setattr(weak_chunks, "FEATURES", 2**14)
    backend = performer(name, head_dim=16, causal=causal, num_features=256)
    peaks = []
    for tokens in (1024, 2048):
        x = [torch.randn(1, 1, tokens, 16, requires_grad=True) for _ in range(3)]
        peaks.append(peak(lambda x=x: torch.autograd.grad(backend(*x).sum(), x), device="cpu").peak_bytes)
    # Queries' and keys' features of 1024 more tokens would take 2 · 1024 · 256 · 4 bytes = 2 MiB. The
    # output, its gradient and those of q, k and v take five rows of 16, the sums a few numbers more.
    assert peaks[1] - peaks[0] < 1024 * 4 * (5 * 16 + 16)


def test_a_step_of_other_devices_holds_as_many_numbers_of_sequences_as_of_heads(monkeypatch):
    monkeypatch.setenv(VARIABLE, "torch")
    monkeypatch.setattr(device_paths, "HELD", 2**17)
    backend, peaks = performer("performer-positive", head_dim=16, num_features=256), []
    for sizes in ((1, 4), (4, 1)):
        x = torch.randn(*sizes, 1024, 16)
        with torch.no_grad():
            peaks.append(peak(lambda x=x: backend(x, x, x), device="cpu").peak_bytes)
    assert peaks[0] == pytest.approx(peaks[1], rel=0.1)


def test_projections_stay_wide():
    backend = performer("performer-positive")
    before = backend.core.features.projection.clone()
    assert torch.equal(backend.to(torch.bfloat16).core.features.projection, before)
