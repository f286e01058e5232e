"""Exponents, sums and denominators at the ends of their ranges: nothing overflows, stalls or underflows."""

import math

import pytest
import torch
from reference import random_mask, random_qkv, reference_linear

import efficient_attn as ea
from efficient_attn.ops.linear.causal import causal_linear_attention, extend_linear_attention
from efficient_attn.ops.linear.full import full_linear_attention
from efficient_attn.ops.linear.inputs import LinearInputs
from efficient_attn.ops.linear.state import LinearState, merge, read, summarise

NAMES = ea.list_backends()
HALF = [torch.float16, torch.bfloat16]
SIZES = {"window": 5, "window-clusters": 4, "linformer": 4}


def built(name, *, causal=False, head_dim=8, max_tokens=64):
    size = ea.spec(name).size_option
    options = {} if size is None else {size: SIZES.get(name, 16)}
    backend = ea.build(name, head_dim=head_dim, max_tokens=max_tokens, causal=causal, **options)
    if backend.needs_calibration:
        backend.calibrate(*random_qkv(1, 1, 1, 64, 64, head_dim, seed=5)[:2])
    return backend


def tokens_with(log_weights, *, kind="positive", mask=None):
    q, k, v = random_qkv(2, 4, 2, 70, 70)
    directions = torch.randn(6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return LinearInputs(q, k, v, mask, directions, log_weights, kind, 0.3)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("constant", [-600.0, -30.0, 30.0, 600.0])
def test_a_constant_added_to_all_exponents_of_keys_cancels(constant, masked):
    mask = random_mask(2, 70) if masked else None
    weights = torch.zeros(2, 1, 6, dtype=torch.float64)
    one, other = (tokens_with(weights + added, mask=mask) for added in (0.0, constant))
    size = one.v.abs().max()
    for attention in (full_linear_attention, causal_linear_attention):
        assert (attention(one).out - attention(other).out).abs().max() <= 1e-12 * size
    for first, second in zip(
        extend_linear_attention(one, None)[0], extend_linear_attention(other, None)[0], strict=True
    ):
        assert (first - second).abs().max() <= 1e-12 * size


@pytest.mark.parametrize("kind", ["positive", "trigonometric"])
@pytest.mark.parametrize("shift", [-200.0, 3.0, 200.0])
def test_a_state_at_another_reference_is_the_same_state(kind, shift):
    tokens, every = tokens_with(None, kind=kind), slice(0, 70)
    state = summarise(tokens.key_features(tokens.key_rows(every), every), tokens.real_rows(tokens.v, every))
    # A shift of every second head, so that no shift of all could hide.
    by = torch.tensor([0.0, shift], dtype=torch.float64)[None, :, None, None]
    moved = LinearState(state.sums * (-by).exp(), state.log_scale + by)
    queries = tokens.query_features(tokens.query_rows(every))
    wanted = read(state, queries)
    bound = 1e-12 * wanted.abs().max()
    assert (read(moved, queries) - wanted).abs().max() <= bound
    assert (read(merge(moved, state), queries) - wanted).abs().max() <= bound


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_scores_up_to_a_million_overflow_nothing_in_half_precision(name, dtype):
    for causal in {False, ea.spec(name).capabilities.causal}:
        backend = built(name, causal=causal, head_dim=64).to(dtype)
        generator = torch.Generator().manual_seed(0)
        # Entries of ±125: a query and an equal key have a product of 64 · 125² = 10⁶.
        k = torch.randint(0, 2, (1, 2, 40, 64), generator=generator).mul(250).sub(125).to(dtype)
        v = torch.randn(1, 2, 40, 8, generator=generator).to(dtype)
        for q in (k, -k):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = backend(*leaves)
            gradients = torch.autograd.grad(out.float().sum(), leaves)
            assert out.isfinite().all() and gradients[2].isfinite().all()
            if ea.spec(name).capabilities.nonnegative:
                assert all(x.isfinite().all() for x in gradients)
        if ea.spec(name).capabilities.exact:
            # A query's own key beats every other by at least 2 · 125² / 8: the weights are one-hot.
            assert torch.equal(backend(k, k, v), v)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_sums_over_65536_tokens_are_taken_in_float32(name, dtype):
    """Equal keys weigh alike: outputs are means of values, whose sums no half-precision number can count."""
    n, capabilities = 65_536, ea.spec(name).capabilities
    causal = capabilities.causal and not capabilities.exact
    backend = built(name, causal=causal, max_tokens=n).to(dtype)
    rows = 4 if capabilities.cross else n
    q, k = (torch.zeros(1, 1, tokens, 8, dtype=dtype) for tokens in (rows, n))
    # The first half of the values are 1, the second 3.
    v = torch.ones(1, 1, n, 1, dtype=dtype)
    v[:, :, n // 2 :] = 3
    out = backend(q, k, v)[0, 0, -rows:, 0].double()
    wanted = v[0, 0, :, 0].double().cumsum(0)[-rows:] / torch.arange(n - rows + 1, n + 1)
    if not causal:
        wanted = v.double().mean().expand(rows)
    if name == "window":
        # The last rows of a window see nothing of the first half.
        assert torch.equal(out[-4:], torch.full((4,), 3.0, dtype=torch.float64))
        return
    # Rounded once, after sums of n numbers in float32 with at most √n roundings in one direction.
    steps = torch.finfo(dtype).eps + math.sqrt(n) * torch.finfo(torch.float32).eps
    assert (out - wanted).abs().max() <= 3 * steps


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("linear-", "performer-"))])
def test_states_and_denominators_of_half_precision_inputs_are_float32(name, dtype):
    backend = built(name, causal=True).to(dtype)
    q, k, v = (x.to(dtype) for x in random_qkv(1, 1, 1, 9, 9))
    out, state = backend.extend(q, k, v)
    assert out.dtype is dtype and all(x.dtype is torch.float32 for x in state)
    outputs = full_linear_attention(backend.core.inputs(q, k, v, None))
    assert outputs.log_normaliser.dtype is torch.float32


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [3.0, 30.0, 300.0])
@pytest.mark.parametrize("name", ["performer-positive", "performer-hyperbolic"])
def test_denominators_that_would_underflow_give_the_estimate(name, size, causal):
    q, k, v = random_qkv(1, 2, 2, 90, 90)
    backend = built(name, causal=causal).double()
    # Opposed to every key: exp(q·k) is exp(−size²) at most.
    direction = torch.nn.functional.normalize(torch.ones(8, dtype=torch.float64), dim=0)
    k, q = size * direction + 0.1 * k, -size * direction + 0.1 * q
    kind, directions = backend.core.features.kind, backend.core.features.projection
    wanted = reference_linear(q, k, v, directions, kind, scale=8**-0.5, causal=causal)
    out = backend(q, k, v)
    # Exponents are as large as |k|²/2 and |w|·|k|, and each is rounded relative to itself.
    largest = (k.norm(dim=-1).max() * 8**-0.25) ** 2 + directions.norm(dim=-1).max() * k.norm(dim=-1).max()
    assert (out - wanted).abs().max() <= 16 * float(largest) * torch.finfo(torch.float64).eps * v.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_denominators_that_underflow_leave_no_nan(name, dtype):
    k, v = (x.to(dtype) for x in random_qkv(1, 2, 2, 90, 90)[1:])
    for causal in {False, ea.spec(name).capabilities.causal}:
        backend = built(name, causal=causal, max_tokens=96).to(dtype)
        for size in (10.0, 1000.0):
            leaves = [x.clone().requires_grad_() for x in (-size * k, k, v)]
            out = backend(*leaves)
            assert out.isfinite().all()
            if ea.spec(name).capabilities.nonnegative:
                gradients = torch.autograd.grad(out.float().sum(), leaves)
                assert all(x.isfinite().all() for x in gradients)
                if ea.spec(name).capabilities.averages:
                    assert out.abs().max() <= v.abs().max() * (1 + 4 * torch.finfo(dtype).eps)
