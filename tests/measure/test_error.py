"""Exact attention in float64, and shares of what a backend reads."""

import pytest
import torch
from reference import random_qkv, reference_attention

import efficient_attn as ea
from efficient_attn.measure import error as measure
from efficient_attn.measure.error import (
    deviations,
    exact_output,
    mean_of_values,
    read_shares,
    relative_error,
)

SCALE = 0.5
ROUNDING = {"rtol": 1e-14, "atol": 1e-14}
Q, K, V = random_qkv(1, 4, 2, 5, 7, 4, 3)
BLOCKS = [(1, torch.float64), (30, torch.float16), (1 << 20, torch.float64)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("entries", "dtype"), BLOCKS)
def test_exact_output_is_the_definition_in_float64_in_blocks_of_any_size(monkeypatch, causal, entries, dtype):
    monkeypatch.setattr(measure, "ENTRIES_AT_ONCE", entries)
    inputs = [x.to(dtype) for x in (Q, K, V)]
    exact = exact_output(*inputs, scale=SCALE, causal=causal)
    torch.testing.assert_close(exact, reference_attention(*inputs, scale=SCALE, causal=causal), **ROUNDING)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("entries", "rows"), [(1, None), (1 << 20, None), (30, [0, 3, 4])])
def test_density_and_covered_mass_are_shares_of_pairs_and_exact_weights(monkeypatch, causal, entries, rows):
    monkeypatch.setattr(measure, "ENTRIES_AT_ONCE", entries)
    q = Q if causal else torch.cat([Q, Q[:, :, :2]], dim=2)
    # Outputs of unit vectors as values are the weights.
    weights = reference_attention(q, K, torch.eye(7).expand(1, 2, 7, 7), scale=SCALE, causal=causal)
    distance = torch.arange(7) - torch.arange(7 - q.shape[2], 7)[:, None]
    weights, near = (x[:, :, rows or slice(None)] for x in (weights, weights * (distance.abs() <= 1)))
    backend = ea.build("window", head_dim=4, window=2 if causal else 3, causal=causal, scale=SCALE)
    density, mass = read_shares(backend, q, K, None if rows is None else torch.tensor(rows))
    assert density == int((near > 0).sum()) / int((weights > 0).sum())
    assert mass == pytest.approx(float(near.sum(dim=-1).mean()))


def test_deviations_are_those_of_their_definition_in_each_head_and_rescaling_changes_no_correlation():
    exact = reference_attention(Q, K, V, scale=SCALE)
    uniform = mean_of_values(Q, V).double()
    out = exact + torch.randn(exact.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = deviations(out, exact, uniform)
    assert found.errors[0] == pytest.approx(relative_error(out, exact))
    for head in range(4):
        ours, right, size = (x[:, head].flatten() for x in (out - uniform, exact - uniform, exact))
        assert found.correlations[1 + head] == pytest.approx(torch.cosine_similarity(ours, right, dim=0))
        assert found.ratios[1 + head] == pytest.approx(float(ours.norm() / right.norm()))
        # The best factor is that of least squares.
        best = float(ours @ right / (ours @ ours)) * ours
        assert found.rescaled_errors[1 + head] == pytest.approx(float((best - right).norm() / size.norm()))
        c, ratio, spread = found.correlations[1 + head], found.ratios[1 + head], right.norm() / size.norm()
        squared = spread**2 * (1 - 2 * c * ratio + ratio**2)
        assert found.errors[1 + head] == pytest.approx(float(squared.sqrt()))
    shrunk = deviations(uniform + 0.3 * (out - uniform), exact, uniform)
    torch.testing.assert_close(shrunk.correlations, found.correlations)
    torch.testing.assert_close(shrunk.ratios, 0.3 * found.ratios)
    # A float32 mean of values deviates by its rounding alone, which has no direction.
    assert deviations(uniform.float().double(), exact, uniform).correlations.isnan().all()
