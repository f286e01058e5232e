"""Chunks of linear attention: sizes, scales, weak rows and states, against the definition in float64."""

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from backend_definitions import by_definition
from reference import assert_near, output_and_gradients, random_mask, random_qkv, reference_linear
from small_backends import small_backend

import efficient_attn as ea
from efficient_attn.ops.linear import causal_exponential, scaled_chunks, weak_chunks
from efficient_attn.ops.linear import inputs as linear_inputs
from efficient_attn.ops.linear import state as linear_state
from efficient_attn.ops.linear.causal import causal_linear_attention
from efficient_attn.ops.linear.inputs import LinearInputs
from efficient_attn.ops.paths import VARIABLE

# Path of the CPU when sums of plain features leave the range of floats.
LOGARITHMS = "logarithms"
FEW = ("linear-elu", "linear-taylor-2", "performer-full", "performer-positive", "performer-trig")
NAMES = [name for name in ea.list_backends() if name.startswith(("linear-", "performer-"))]
SCALED = [*(("linear-elu", path) for path in ("", "torch", LOGARITHMS)), ("performer-positive", "torch")]
WAYS = [("", None, False), ("", -0.4, False), ("", -0.4, True), ("torch", None, False), ("torch", -0.4, True)]
LINEAR = [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in NAMES]


def take(path, monkeypatch):
    """Take the path of the CPU (""), of other devices ("torch") or of logarithms."""
    monkeypatch.setenv(VARIABLE, path.removeprefix(LOGARITHMS))
    if path == LOGARITHMS:
        monkeypatch.setattr(linear_inputs, "RANGE", dict.fromkeys(linear_inputs.RANGE, 0.0))


def built(name, scale=None, *, head_dim=4, causal=True):
    return small_backend(name, 2 * head_dim, head_dim=head_dim, causal=causal, scale=scale)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("name", "path"), SCALED)
def test_scales_far_from_zero_lose_no_digits(name, path, dtype, monkeypatch):
    take(path, monkeypatch)
    backend = built(name)
    tensors = [x.to(dtype).requires_grad_() for x in random_qkv(2, 4, 2, 192, 192, head_dim=4)]
    actual = output_and_gradients(backend.to(dtype), tensors)
    precise = [x.detach().double().requires_grad_() for x in tensors]
    expected = output_and_gradients(partial(by_definition, backend.double()), precise)
    # Some roundings of exponents below 4 and of sums of 192 terms; exponents of 300 or 40 would have more.
    bound = 16 * torch.finfo(dtype).eps
    assert all((x - y).norm() <= bound * y.norm() for x, y in zip(actual, expected, strict=True))


@pytest.mark.parametrize(("path", "scale", "masked"), WAYS)
@pytest.mark.parametrize("name", LINEAR)
def test_tokens_after_a_state_have_the_rows_and_gradients_of_one_call(name, path, scale, masked, monkeypatch):
    monkeypatch.setenv(VARIABLE, path)
    backend, (q, k, v) = built(name, scale), random_qkv(2, 4, 2, 24, 24, head_dim=4)
    # The longest key comes with a decoding step, and the state goes to its scale.
    k[..., 9, :] *= 3
    inputs = [x.requires_grad_() for x in (q, k, v)]
    # The first keys of a batch entry are masked, more than the first call has.
    mask = (torch.arange(24) > torch.tensor([[-1], [9]])) & random_mask(2, 24) if masked else None
    expected = output_and_gradients(partial(backend, key_mask=mask), inputs)
    for constant, size in {"CHUNK": 8, "LARGE_CHUNK": 8, "MULTIPLE": 4}.items():
        monkeypatch.setattr(scaled_chunks, constant, size)

    def in_parts(*tensors):
        state, rows = None, []
        # Two chunks with padding, decoding steps, and padding again.
        for start, stop in pairwise([0, 9, 10, 11, 24]):
            part = None if mask is None else mask[:, start:stop]
            out, state = backend.extend(*(x[..., start:stop, :] for x in tensors), state, key_mask=part)
            rows.append(out)
        return torch.cat(rows, dim=-2)

    assert_near([in_parts(*(x.detach() for x in inputs))], expected[:1], 1e-11)
    assert_near(output_and_gradients(in_parts, inputs), expected, 1e-10)


def test_a_row_whose_features_are_small_where_those_of_its_key_are_large_reads_it(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    # Row 0 reads key 0 with e⁻³⁰⁰, below the range of float32 at the largest features of the chunk.
    q = torch.tensor([[-300.0, 0.0], [0.0, 0.0]])[None, None]
    k = torch.tensor([[0.0, -400.0], [-400.0, 0.0]])[None, None]
    v = torch.tensor([[1.0], [2.0]])[None, None]
    inputs = LinearInputs(q, k, v, None, None, None, None, "exponential", 1.0)
    out = causal_linear_attention(inputs).out.flatten()
    assert (out - torch.tensor([1.0, 1.5])).abs().max() <= 1e-6


def rising(norm):
    """Inputs whose keys grow, so that early rows of a chunk see only keys far below its largest."""
    q, k, v = random_qkv(1, 2, 2, 150, 150, head_dim=8, value_dim=4)
    growth = torch.linspace(0.05, norm, 150, dtype=torch.float64)[:, None]
    return [q, k * growth, v]


def test_other_devices_compute_a_fixed_number_of_weak_chunks_again(monkeypatch):
    monkeypatch.setenv(VARIABLE, "torch")
    rows = torch.zeros(2, 3, 4, 1, dtype=torch.bool)
    rows[0, 2, :2], rows[1, 1, :3] = True, True
    monkeypatch.setattr(weak_chunks, "FEATURES", 2 * 4 * 8)
    (actual,) = weak_chunks.weak_chunks(rows, 8)
    assert actual.tolist() == [4, 2]
    monkeypatch.setattr(weak_chunks, "FEATURES", 1)
    (actual,) = weak_chunks.weak_chunks(torch.ones(2, 64, 4, 1, dtype=torch.bool), 8)
    assert len(actual) == 2 * 64 // weak_chunks._SHARE
    monkeypatch.setenv(VARIABLE, "")
    assert [x.tolist() for x in weak_chunks.weak_chunks(rows, 8)] == [[2], [4]]


@pytest.mark.parametrize(("tiny", "norm"), [(0.25, 6.0), (None, 1.0)], ids=["halved", "whole"])
def test_gradients_are_right_and_chunks_halved_where_exponential_features_are_large(tiny, norm, monkeypatch):
    chunks, query_gradients = [], causal_exponential._query_gradients
    monkeypatch.setenv(VARIABLE, "")

    def recorded(*args):
        actual = query_gradients(*args)
        chunks.extend(actual[1])
        return actual

    # Results show no chunks.
    monkeypatch.setattr(causal_exponential, "_query_gradients", recorded)
    monkeypatch.setitem(linear_state.TINY, torch.float64, tiny or linear_state.TINY[torch.float64])
    backend, inputs = built("performer-positive", head_dim=8), [x.requires_grad_() for x in rising(norm)]
    results = output_and_gradients(backend, inputs)
    expected = output_and_gradients(partial(by_definition, backend), inputs)
    whole = math.ceil(150 / causal_exponential.BACKWARD_CHUNK)
    assert len(chunks) > whole if tiny else len(chunks) == whole
    assert_near(results, expected, 1e-9)


@pytest.mark.parametrize("path", ["", "torch"])
@pytest.mark.parametrize("name", LINEAR)
def test_gradients_stay_finite_where_early_rows_lie_far_below_their_chunk(name, path, monkeypatch):
    monkeypatch.setenv(VARIABLE, path)
    inputs = [x.float().requires_grad_() for x in rising(60.0)]
    backend = built(name, head_dim=8).float()
    out, state = backend.extend(*(x[..., :40, :] for x in inputs))
    later, _ = backend.extend(*(x[..., 40:, :] for x in inputs), state)
    for result in (torch.cat([out, later], dim=-2), backend(*inputs)):
        for x in (result, *torch.autograd.grad(result.sin().sum(), inputs)):
            assert x.isfinite().all()


POSITIVE = ea.build("performer-positive", head_dim=16, causal=True, num_features=64)
DIRECTIONS = POSITIVE.core.features.projection


def output(q, k, v, **options):
    expected = reference_linear(q, k, v, DIRECTIONS, "positive", scale=0.25, causal=True, **options)
    return POSITIVE(q, k, v, **options), expected


def worst_row(out, reference):
    """Relative error of each row."""
    return (out.double() - reference).norm(dim=-1) / reference.norm(dim=-1).clamp_min(1e-300)


def test_rows_before_the_longest_keys_keep_all_digits(monkeypatch):
    monkeypatch.setattr(causal_exponential, "CHUNK", 16)
    q, k, v = (x.float() for x in random_qkv(1, 2, 1, 96, 96, head_dim=16))
    q[..., 40:50, :] *= 20
    k[..., 40:50, :] *= 20
    mask = torch.arange(96)[None] != 41
    out, expected = output(q, k, v, key_mask=mask)
    # What float32 is promised at norms of 20 times Gaussian.
    assert worst_row(out, expected).max() < 1e-3
    calm = worst_row(out, expected)[..., :32]
    # Exponents below 32 are rounded to 32 · 6e-8, and a row's weights are off by a few of these.
    assert calm.max() < 8 * 32 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("size", [1e30, 1e-30, 1.0])
def test_values_of_any_size_keep_their_digits_beside_large_and_small_features(size):
    q, k, v = (x.float() for x in random_qkv(1, 1, 1, 48, 48, head_dim=16))
    q[..., 5, :], q[..., 20, :], k[..., 7, :] = (factor * DIRECTIONS[0] for factor in (1.9, -1.9, 1.2))
    out, expected = output(q, k, v * size)
    # Exponents below 40 are rounded to 40 · 6e-8.
    assert worst_row(out.double() / size, expected / size).max() < 8 * 40 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("path", ["", "torch", LOGARITHMS])
def test_small_upstream_gradients_keep_their_digits(path, monkeypatch):
    take(path, monkeypatch)
    q, k, v = (x.float().requires_grad_() for x in random_qkv(1, 2, 2, 40, 40))
    upstream = torch.randn(1, 2, 40, v.shape[-1])
    out = ea.build("linear-elu", head_dim=q.shape[-1], causal=True)(q, k, v)
    factors = 1.0, 2.0**-40
    pair = (torch.autograd.grad(out, (q, k, v), upstream * x, retain_graph=True) for x in factors)
    for x, y in zip(*pair, strict=True):
        torch.testing.assert_close(x, y * 2.0**40)


@pytest.mark.parametrize("causal", [False, True])
def test_sums_beyond_the_range_of_floats_are_taken_from_logarithms(causal, monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    backend = ea.build("linear-elu", head_dim=2, causal=causal, scale=1.0)
    # Sums of e⁻¹⁰⁰, where float32 ends at e⁻¹⁰³; sums of 1e40, beyond its largest number; ordinary sums.
    for q, k in (
        ([[-100.0, 0.0], [0.0, -99.0]], [[0.0, -100.0], [-2.0, -101.0]]),
        ([[1e20, 1e20], [2e20, 1.0]], [[1e20, 0.0], [1.0, 1e20]]),
        ([[-1.0, 0.5], [0.2, 3.0]], [[0.4, 0.1], [-1.0, 1.0]]),
    ):
        q, k = (torch.tensor(x)[None, None].requires_grad_() for x in (q, k))
        v = torch.tensor([[1.0, 2.0], [3.0, -1.0]])[None, None].requires_grad_()
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        expected = output_and_gradients(partial(by_definition, backend), exact)
        for actual, reference in zip(output_and_gradients(backend, (q, k, v)), expected, strict=True):
            # Exponents of 100 are rounded to 100 · 6e-8. The definition has no gradient at 1e20.
            assert (actual.double() - reference).nan_to_num().abs().max() <= 1e-4
            assert actual.isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
def test_rows_without_keys_do_not_count_as_sums_beyond_the_range(causal, monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    kinds = []
    for name in ("key_features", "query_gradient"):
        method = getattr(LinearInputs, name)
        monkeypatch.setattr(LinearInputs, name, lambda x, *y, f=method: kinds.append(x.kind) or f(x, *y))
    q, k, v = (x.requires_grad_() for x in random_qkv(2, 2, 1, 80, 90))
    # A sequence without keys, and another whose first rows see none.
    mask = torch.arange(90) >= torch.tensor([[90], [40]])
    backend = ea.build("linear-elu", head_dim=8, causal=causal)
    output_and_gradients(partial(backend, key_mask=mask), (q, k, v))
    assert set(kinds) == {"plain-elu"}
