"""Least errors of attention weights: by hand, by sampling, and below the errors of all backends."""

import math

import pytest
import torch
from reference import reference_attention

import efficient_attn as ea
from efficient_attn.measure.calls import BASELINES
from efficient_attn.measure.variants import UNIFORM_ATTENTION
from efficient_attn.registry import SPECS
from efficient_attn.theory.floors import rank_floor, unbiased_error, weight_spectra

TOKENS, HEAD_DIM, HEADS = 24, 4, 2
STANDARD_ERRORS = 4
BOTH = pytest.mark.parametrize("causal", [False, True])
RANKED = {name for name, spec in SPECS.items() if spec.rank is not None}


def draw(tokens=TOKENS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 1, HEADS, tokens, HEAD_DIM, generator=generator, dtype=torch.float64)


def exact_weights(q, k, *, causal=False, key_mask=None):
    unit = torch.eye(k.shape[2]).expand(*k.shape[:2], -1, -1)
    return reference_attention(q, k, unit, scale=HEAD_DIM**-0.5, causal=causal, key_mask=key_mask)


def uniform_causal(tokens):
    """Weights of a single feature, 1 for every token."""
    ones = torch.ones(1, 1, tokens, tokens, dtype=torch.float64).tril()
    return ones / ones.sum(dim=-1, keepdim=True)


def relative(weights, exact):
    errors, squares = (x.square().sum(dim=(-2, -1)) for x in (weights - exact, exact))
    return float((errors / squares).mean().sqrt())


def test_the_floor_is_the_error_of_the_truncated_decomposition():
    weights = exact_weights(*draw())
    left, values, right = torch.linalg.svd(weights)
    spectra = weight_spectra(weights, causal=False)
    for rank in (1, 5, TOKENS - 1):
        best = (left[..., :rank] * values[..., None, :rank]) @ right[..., :rank, :]
        assert rank_floor(spectra, rank) == pytest.approx(relative(best, weights), rel=1e-9)
    assert rank_floor(spectra, TOKENS) == 0.0


def test_the_causal_floor_is_the_sum_over_disjoint_blocks_below_the_diagonal():
    weights = exact_weights(*draw(tokens=5), causal=True)
    # Rows from 2 and columns to 2, then two triangles of two rows, whose blocks have rank one.
    tail = torch.linalg.svdvals(weights[..., 2:, :3])[..., 1:].square().sum(dim=-1)
    expected = float((tail / weights.square().sum(dim=(-2, -1))).mean().sqrt())
    assert rank_floor(weight_spectra(weights, causal=True), 1) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
def test_features_before_a_causal_mask_lie_above_the_causal_floor_and_below_the_one_without_a_mask(tokens):
    exact = uniform_causal(tokens)
    assert rank_floor(weight_spectra(exact, causal=True), 1) < 1e-12
    if tokens > 2:
        # The truncated decomposition is no bound: these weights of one feature have no error at all.
        assert rank_floor(weight_spectra(exact, causal=False), 1) > 0.1
    generator = torch.Generator().manual_seed(tokens)
    for rank in (1, 2, 3):
        q, k = torch.rand(2, 1, 1, tokens, rank, generator=generator, dtype=torch.float64)
        masked = (q @ k.mT).tril()
        masked /= masked.sum(dim=-1, keepdim=True)
        assert rank_floor(weight_spectra(masked, causal=True), rank) < 1e-12


@BOTH
@pytest.mark.parametrize("size", [2, 6, 12])
@pytest.mark.parametrize("name", [*sorted(RANKED), UNIFORM_ATTENTION])
def test_no_backend_with_a_rank_errs_less_than_the_floor(name, size, causal):
    spec = BASELINES.get(name) or ea.spec(name)
    if causal and not spec.capabilities.causal:
        pytest.skip("not causal")
    q, k = draw()
    options = {} if spec.size_option is None else {spec.size_option: size}
    backend = ea.build(spec, head_dim=HEAD_DIM, num_heads=HEADS, max_tokens=TOKENS, causal=causal, **options)
    if backend.needs_calibration:
        backend.calibrate(q, k)
    rank = spec.rank(backend.problem, backend.options)
    masked = torch.arange(TOKENS) % 5 != 2
    for key_mask in (None, masked[None]):
        weights = backend.double().attention_weights(q, k, key_mask=key_mask).detach()
        # The weights are their own target: a rank that is too small would leave them an error.
        assert rank_floor(weight_spectra(weights, causal=causal), rank) < 1e-9
        exact = exact_weights(q, k, causal=causal, key_mask=key_mask)
        floor = rank_floor(weight_spectra(exact, causal=causal), rank)
        assert relative(weights, exact) >= floor * (1 - 1e-9)


def test_backends_with_a_rank_are_all_that_sum_over_features_landmarks_or_projected_tokens():
    without = {name for name in ea.list_backends() if ea.spec(name).rank is None}
    assert without == {"bigbird", "block-topk", "exact", "exact-dense", "oracle-topk", "window"} | {
        "window-clusters"
    }


def test_singular_triplets_reach_the_best_unbiased_estimate():
    draws, terms = 4000, 3
    weights = exact_weights(*draw(tokens=9))[0, 0]
    left, values, right = torch.linalg.svd(weights)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(values, draws * terms, replacement=True, generator=generator)
    chosen = left[:, drawn].mT[:, :, None] * right[drawn][:, None, :] * values.sum()
    means = chosen.unflatten(0, (draws, terms)).mean(dim=1)
    errors = (means - weights).square().sum(dim=(-2, -1)) / weights.square().sum()
    expected = unbiased_error(weight_spectra(weights[None, None], causal=False), terms) ** 2
    assert abs(float(errors.mean()) - expected) < STANDARD_ERRORS * float(errors.std()) / math.sqrt(draws)
    torch.testing.assert_close(means.mean(dim=0), weights, atol=0.1, rtol=0.0)


def test_weights_divided_by_their_own_sums_can_err_less_than_the_best_unbiased_estimate():
    q, k, _ = (x.double() for x in ea.sample(0))
    exact = (q @ k.mT * q.shape[-1] ** -0.5).softmax(dim=-1)
    spectra = weight_spectra(exact, causal=False)
    build = {"head_dim": q.shape[-1], "num_features": 16}
    error = relative(ea.build("performer-positive", **build).attention_weights(q, k), exact)
    assert rank_floor(spectra, 16) < error < unbiased_error(spectra, 16)
