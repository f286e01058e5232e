"""Exponents, sums and denominators at the ends of their ranges: nothing overflows, stalls or underflows."""

from operator import gt, lt

import pytest
import torch
from reference import assert_near, random_mask, random_qkv, reference_linear
from torch import Tensor

import efficient_attn as ea
from efficient_attn.ops.linear.causal import causal_linear_attention, extend_linear_attention
from efficient_attn.ops.linear.full import full_linear_attention
from efficient_attn.ops.linear.inputs import LinearInputs
from efficient_attn.ops.linear.state import LinearState, merge, read, summarise
from efficient_attn.ops.linear.trigonometric import TrigKernel


def tokens_with(log_weights, *, kind="positive", mask=None):
    q, k, v = random_qkv(2, 4, 2, 70, 70)
    directions = torch.randn(6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return LinearInputs(q, k, v, mask, directions, log_weights, kind, 0.3)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("constant", [-600.0, -30.0, 30.0, 600.0])
def test_a_constant_added_to_all_exponents_of_keys_cancels(constant, masked):
    mask = random_mask(2, 70) if masked else None
    weights = torch.zeros(2, 1, 6, dtype=torch.float64)
    plain, moved = (tokens_with(weights + added, mask=mask) for added in (0.0, constant))
    size = plain.v.abs().max()
    for attention in (full_linear_attention, causal_linear_attention):
        assert (attention(plain).out - attention(moved).out).abs().max() <= 1e-12 * size
    pair = (extend_linear_attention(inputs, None)[0] for inputs in (plain, moved))
    for x, y in zip(*pair, strict=True):
        assert (x - y).abs().max() <= 1e-12 * size


@pytest.mark.parametrize("kind", ["positive", "trigonometric"])
@pytest.mark.parametrize("shift", [-200.0, 3.0, 200.0])
def test_a_state_at_another_reference_is_the_same_state(kind, shift):
    tokens, rows = tokens_with(None, kind=kind), slice(0, 70)
    state = summarise(tokens.key_features(tokens.key_rows(rows), rows), tokens.real_rows(tokens.v, rows))
    # A shift of rows second head, so that no shift of all could hide.
    by = torch.tensor([0.0, shift], dtype=torch.float64)[None, :, None, None]
    moved = LinearState(state.sums * (-by).exp(), state.log_scale + by)
    queries = tokens.query_features(tokens.query_rows(rows))
    expected = read(state, queries)
    bound = 1e-12 * expected.abs().max()
    assert (read(moved, queries) - expected).abs().max() <= bound
    assert (read(merge(moved, state), queries) - expected).abs().max() <= bound


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", [name for name in ea.list_backends() if name.startswith(("linear-", "perf"))]
)
def test_states_and_denominators_of_half_precision_inputs_are_float32(name, dtype):
    backend = ea.build(name, head_dim=8, causal=True)
    if backend.needs_calibration:
        backend.calibrate(*random_qkv(1, 1, 1, 64, 64, 8, seed=5)[:2])
    q, k, v = (x.to(dtype) for x in random_qkv(1, 1, 1, 9, 9))
    out, state = backend.to(dtype).extend(q, k, v)
    assert out.dtype is dtype and all(x.dtype is torch.float32 for x in state)
    outputs = full_linear_attention(backend.core.inputs(q, k, v, None))
    assert outputs.log_normaliser.dtype is torch.float32


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [3.0, 30.0, 300.0])
@pytest.mark.parametrize("name", ["performer-positive", "performer-hyperbolic"])
def test_denominators_that_would_underflow_give_the_estimate(name, size, causal):
    q, k, v = random_qkv(1, 2, 2, 90, 90)
    backend = ea.build(name, head_dim=8, num_features=16, causal=causal).double()
    # Opposed to rows key: exp(q·k) is exp(−size²) at most.
    direction = torch.nn.functional.normalize(torch.ones(8, dtype=torch.float64), dim=0)
    k, q = size * direction + 0.1 * k, -size * direction + 0.1 * q
    kind, directions = backend.core.features.kind, backend.core.features.projection
    expected = reference_linear(q, k, v, directions, kind, scale=8**-0.5, causal=causal)
    out = backend(q, k, v)
    # Exponents are as large as |k|²/2 and |w|·|k|, and each is rounded relative to itself.
    largest = (k.norm(dim=-1).max() * 8**-0.25) ** 2 + directions.norm(dim=-1).max() * k.norm(dim=-1).max()
    assert (out - expected).abs().max() <= 16 * float(largest) * torch.finfo(
        torch.float64
    ).eps * v.abs().max()


def flat_clamp(x, min=None, max=None):  # as torch names them
    """A clamp whose derivative at its bounds is 0."""
    for inside, bound in ((gt, min), (lt, max)):
        x = x if bound is None else torch.where(inside(x, bound), x, bound)
    return x


def steep_clamp(x, min=None, max=None):
    """A clamp whose derivative at its bounds is 1."""
    for outside, bound in ((lt, min), (gt, max)):
        x = x if bound is None else torch.where(outside(x, bound), bound, x)
    return x


@pytest.mark.parametrize("name", ["performer-trig", "linear-taylor-2", "linear-elu", "window-clusters"])
def test_gradients_do_not_depend_on_the_derivative_of_a_clamp_at_its_bounds(name, monkeypatch):
    # It is 1 before torch 2.15, and 0 from there on.
    inputs = random_qkv(q_tokens=40, k_tokens=40)
    # The map of linear-elu has two branches that meet at 0.
    inputs[0][..., ::3, :] = 0.0
    sizes = {"window": 4, "clusters": 4, "probes": 0} if name == "window-clusters" else {}
    backend = ea.build(name, head_dim=8, causal=not sizes, **sizes).double()

    def gradients(clamp):
        for method, bounds in (("clamp", ("min", "max")), ("clamp_min", ("min",)), ("clamp_max", ("max",))):
            monkeypatch.setattr(
                Tensor,
                method,
                lambda x, *limits, bounds=bounds, **named: clamp(
                    x, **dict(zip(bounds, limits, strict=False)), **named
                ),
            )
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        out = backend(q, k, v) if sizes else backend.extend(q, k, v)[0]
        return torch.autograd.grad(out.sin().sum(), (q, k, v))

    assert_near(gradients(flat_clamp), gradients(steep_clamp), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_waves_are_right_to_a_few_roundings_of_one_at_every_angle(dtype):
    # One direction of length one, so that the rows are the angles, among them the poles of the tangent.
    turns = torch.arange(-40, 41, dtype=torch.float64)
    angles = torch.cat([turns * torch.pi / 2, turns * torch.pi / 4, torch.linspace(-300, 300, 20001)]).to(
        dtype
    )
    rows = angles[None, :, None]
    tokens = LinearInputs(
        rows[None], rows[None], rows[None], None, torch.ones(1, 1), None, "trigonometric", 1.0
    )
    features = TrigKernel(tokens).key_features(rows, torch.ones((), dtype=dtype))[0]
    expected = torch.stack([angles.double().cos(), angles.double().sin()], dim=-1)
    # In halves of an epsilon: the tangent's own ulp moves a wave by 2, the square, the sum and the quotient
    # of at most 2 by 6, the difference by 1.
    assert (features.double() - expected).abs().max() <= 9 * torch.finfo(dtype).eps / 2


def test_the_factor_multiplies_and_a_scale_below_zero_turns_the_queries():
    q, k, v = random_qkv(1, 2, 2, 3, 4)
    directions = torch.randn(5, 8, dtype=torch.float64)
    kernel = TrigKernel(LinearInputs(q, k, v, None, directions, None, "trigonometric", -0.25))
    rows, factor = q.flatten(0, 1), torch.rand(2, 3, 1, dtype=torch.float64)
    angles = -0.5 * rows @ directions.mT
    expected = factor * torch.cat([angles.cos(), angles.sin()], dim=-1)
    torch.testing.assert_close(kernel.query_features(rows, factor), expected, rtol=0, atol=1e-14)
