"""Estimated errors of rows of `window-clusters`, against the formula written out and on real activations."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from reference import random_mask, random_qkv
from written_out import BLOCK, CLUSTERS, PROBES, SCALE, WINDOW, leaves, runs_at, size_at

import efficient_attn as ea
from efficient_attn.backends import window_clusters
from efficient_attn.errors import CalibrationError, UnsupportedError
from efficient_attn.measure.error import exact_output
from efficient_attn.modules import probing

KINDS = pytest.mark.parametrize(
    ("causal", "options"),
    [
        (False, {}),
        (False, {"summary": "segments"}),
        (False, {"probes": PROBES}),
        (True, {"probes": PROBES}),
    ],
)


def built(causal=False, **options):
    sizes = {"window": WINDOW, "clusters": CLUSTERS, "global_tokens": 0}
    return ea.build("window-clusters", head_dim=8, causal=causal, **{**sizes, **options})


def one_error(p, spread, factor, count, distance):
    """p² E(e^δ/m − 1)² E|v − out|², for n scores of which the largest lies √(2 ln n) deviations up."""
    deviation, largest = math.sqrt(spread), math.sqrt(2 * math.log(count))

    def mean(t):
        level = t * deviation
        return math.exp(level**2 / 2 if level < largest else largest * level - largest**2 / 2)

    relative = mean(2) / factor**2 - 2 * mean(1) / factor + 1
    return min(p**2 * mean(2) / factor**2, 1.0) / (mean(2) / factor**2) * relative * distance


@KINDS
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("first", [0, 3])
def test_the_attention_that_is_estimated_is_the_output(monkeypatch, first, masked, causal, options):
    q, k, v = random_qkv(2, 4, 2, 31 if causal else 67, 67)
    k, mask = k + 3.0, random_mask(2, 67) if masked else None
    backend, columns = built(causal, global_tokens=first, **options), []
    for module, name in [(window_clusters, "clusters_with_errors"), (probing, "probing_with_errors")]:
        inner = getattr(module, name)
        monkeypatch.setattr(
            module,
            name,
            lambda *args, inner=inner, **named: columns.append(inner(*args, **named)) or columns[-1],
        )
    errors = backend.estimate_error(q, k, v, key_mask=mask)
    assert (columns[0][..., :-1] - backend(q, k, v, key_mask=mask)).abs().max() <= 1e-12
    assert errors.shape == q.shape[:3] and torch.equal(errors, columns[0][..., -1])


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("causal", [False, True])
def test_the_estimate_of_closed_clusters_is_the_formula_for_every_query(causal):
    q, k, v = random_qkv(1, 1, 1, 67, 67)
    # Standard deviations of the scores on both sides of √(2 ln 4) = 1.7.
    q = q * torch.linspace(0.3, 4, 67, dtype=q.dtype)[:, None]
    backend = built(causal, probes=PROBES)
    found, out = backend.estimate_error(q, k, v)[0, 0], backend(q, k, v)[0, 0]
    q, k, v, sides = q[0, 0] * SCALE, k[0, 0], v[0, 0], set()
    for i in range(67):
        size = size_at(i, 67, CLUSTERS, causal)
        begin = i // size * size
        last = i + 1 if causal else min(begin + 2 * size, 67)
        total = (k[max(begin - size, 0) : last] @ q[i]).exp().sum()
        closed = []
        runs = [(list(run), run if causal else range(67)) for run in runs_at(i, 67, size, causal)]
        for c in [leaf for run, sharing in runs for leaf in leaves(list(k), run, size, sharing)]:
            mean, spread = q[i] @ k[c].mean(dim=0), float(q[i].square() @ k[c].var(dim=0, correction=0))
            factor = 1 + spread / 2 + spread**2 / 8
            weight = len(c) * float(mean.exp()) * factor
            closed.append((math.log(len(c)) + float(mean) + 3 * spread**0.5, c, weight, spread, factor))
        closed.sort(key=lambda one: -one[0])
        total = float(total + sum((k[c] @ q[i]).exp().sum() for _, c, *_ in closed[:PROBES]))
        total += sum(weight for _, _, weight, *_ in closed[PROBES:])
        wanted = 0.0
        for _, c, weight, spread, factor in closed[PROBES:]:
            distance = float((v[c] - out[i]).square().sum(dim=1).mean())
            wanted += one_error(weight / total, spread, factor, size, distance)
            sides.add(spread**0.5 < math.sqrt(2 * math.log(size)))
        assert float(found[i]) == pytest.approx(math.sqrt(wanted), rel=1e-6, abs=1e-7)
    assert sides == {True, False}


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("causal", [False, True])
def test_heads_of_their_own_numbers_have_their_own_estimates_and_exact_ones_none(causal):
    q, k, v = random_qkv(2, 6, 3, 67, 67)
    backend = built(causal, target_error=0.1)
    with pytest.raises(CalibrationError, match="has to see typical queries"):
        backend.estimate_error(q, k, v)
    backend.calibrate(q, k, v)
    numbers = [2, CLUSTERS, 0, 1, 1, CLUSTERS]
    backend.core.use(numbers)
    found = backend.estimate_error(q, k, v)
    for head, number in enumerate(numbers):
        one, of_keys = slice(head, head + 1), slice(head // 2, head // 2 + 1)
        alone = built(causal, target_error=0.1)
        alone.core.use([number])
        wanted = alone.estimate_error(q[:, one], k[:, of_keys], v[:, of_keys])
        assert (found[:, one] - wanted).abs().max() <= 1e-7
        assert found[:, head].any() == (number < CLUSTERS)
        if 0 < number < CLUSTERS:
            fixed = built(causal, probes=number).estimate_error(q, k, v)
            assert (found[:, one] - fixed[:, one]).abs().max() <= 1e-7


def test_the_estimate_of_a_single_cluster_is_the_formula():
    q, k, v = random_qkv(1, 1, 1, 48, 48)
    q = q * torch.linspace(0.3, 4, 48, dtype=q.dtype)[:, None]
    backend = built(clusters=1)
    found, out = backend.estimate_error(q, k, v)[0, 0], backend(q, k, v)[0, 0]
    q, k, v = q[0, 0] * SCALE, k[0, 0], v[0, 0]
    tilt = q.mean(dim=0)
    for i in range(48):
        begin, back = i // BLOCK * BLOCK, BLOCK // 2
        near = [j for j in range(max(begin - back, 0), begin + BLOCK + back) if j < 48]
        far = [j for j in range(48) if j not in near]
        w = (k[far] @ tilt).exp()
        share = w / w.sum()
        mean = share @ k[far]
        variance = share @ (k[far] - mean).square()
        half = float(q.var(dim=0, correction=0) @ variance) / 2
        factor = 1 + half + half**2 / 2
        weight = float(w.sum() * ((q[i] - tilt) @ mean).exp()) * factor
        p = weight / (weight + float((k[near] @ q[i]).exp().sum()))
        distance = float(share @ (v[far] - out[i]).square().sum(dim=1))
        wanted = one_error(p, float((q[i] - tilt).square() @ variance), factor, 48, distance)
        assert float(found[i]) == pytest.approx(math.sqrt(wanted), rel=1e-6)


@KINDS
def test_masked_keys_of_any_content_change_no_estimate(causal, options):
    q, k, v = random_qkv(2, 2, 2, 67, 67)
    mask = torch.arange(67) < torch.tensor([[67], [30]])
    before = built(causal, **options).estimate_error(q, k, v, key_mask=mask)
    k[1, :, 30:], v[1, :, 30:] = float("nan"), float("inf")
    assert torch.equal(built(causal, **options).estimate_error(q, k, v, key_mask=mask), before)


@KINDS
def test_estimates_are_finite_at_any_norm_and_in_half_precision(causal, options):
    q, k, v = random_qkv(1, 2, 2, 67, 67)
    for size in (1e-3, 30.0, 3000.0):
        found = built(causal, **options).estimate_error(*((x * size).float() for x in (q, k)), v.float())
        assert bool(found.isfinite().all()) and bool((found >= 0).all())
    half = built(causal, **options).half().estimate_error(q.half(), k.half(), v.half().requires_grad_())
    assert half.dtype == torch.float32 and not half.requires_grad


def test_a_row_that_reads_every_key_has_no_error():
    q, k, v = random_qkv(1, 2, 2, 67, 67)
    assert not built(probes=CLUSTERS).estimate_error(q, k, v).any()
    assert not built(True, probes=PROBES).estimate_error(q, k, v)[:, :, : 2 * BLOCK].any()
    assert built().estimate_error(q[:, :, :0], k[:, :, :0], v[:, :, :0]).shape == (1, 2, 0)
    assert torch.equal(built().estimate_error(q, k, v[..., :0]), q.new_zeros(1, 2, 67))


@pytest.mark.parametrize("name", ["exact", "window", "performer-positive", "linear-elu"])
def test_backends_without_second_moments_refuse(name):
    q, k, v = random_qkv(1, 2, 2, 12, 12)
    with pytest.raises(UnsupportedError, match=f"{name}' has no estimate of its error; .* ea.audit measures"):
        ea.build(name, head_dim=8).estimate_error(q, k, v)


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "probes"), [(0, 0), (0, 4), (1, 0), (1, 4), (5, 0), (5, 4), (19, 4)])
def test_estimates_rank_real_rows_and_cover_nineteen_of_twenty(layer, probes):
    q, k, v = (x[:, :, :2048] for x in ea.sample(layer, 4 if layer == 19 else 0))
    causal = layer == 19
    sizes = {"probes": probes, "clusters": 64 if causal or not probes else 32, "global_tokens": 4 * causal}
    backend = ea.build("window-clusters", head_dim=q.shape[-1], causal=causal, window=64, **sizes)
    errors = (backend(q, k, v) - exact_output(q, k, v, scale=backend.problem.factor, causal=causal)).norm(
        dim=-1
    )
    found = backend.estimate_error(q, k, v)
    # Rows that read every key have rounding errors alone.
    errors, found = (x[found > 0].double().numpy() for x in (errors, found))
    assert scipy.stats.spearmanr(errors, found)[0] >= 0.6
    # Half a percent less than the tables of the docs, whose first layer is the exception.
    assert np.mean(errors <= 2.2 * found) >= (0.915 if layer == 0 else 0.95)
