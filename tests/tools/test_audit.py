"""The audit: exact rows, an unbiased error, and intervals that cover it."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from reference import random_qkv, reference_attention

import efficient_attn as ea
from efficient_attn.errors import DataError, DtypeError, OptionError, UnsupportedError
from efficient_attn.measure.error import Sample, exact_output, random_positions
from efficient_attn.tools.audit import estimate


def squares(backend, q, k, v, mask=None):
    """Squared errors and squares of the exact output, [batch heads q_tokens], in float64."""
    causal, scale = backend.problem.causal, backend.problem.factor
    exact = reference_attention(q, k, v, scale=scale, causal=causal, key_mask=mask)
    out = backend(q, k, v, key_mask=mask).double()
    return (out - exact).square().sum(dim=-1), exact.square().sum(dim=-1)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("name", "causal", "queries", "kv_heads"),
    [
        *(("window", causal, queries, 2) for causal, queries in ((False, 40), (True, 40), (True, 9))),
        *(("linformer", False, queries, kv_heads) for queries in (12, 40) for kv_heads in (1, 2)),
        ("performer-positive", False, 12, 2),
    ],
)
def test_an_audit_of_all_rows_is_the_error_itself(name, causal, queries, kv_heads, masked):
    options = {"window": {"window": 9}, "linformer": {"max_tokens": 40, "rank": 6}}.get(name, {})
    backend = ea.build(name, head_dim=8, num_heads=4, causal=causal, **options).requires_grad_(False)
    q, k, v = random_qkv(2, 4, kv_heads, queries, 40)
    k = k * torch.arange(1, kv_heads + 1)[:, None, None]
    mask, real = None, torch.ones(2, queries, dtype=torch.bool)
    if masked:
        mask = torch.rand(2, 40, generator=torch.Generator().manual_seed(1)) > 0.3
        mask[0, :5] = False
        # Queries of other tokens than the keys are all audited.
        real = mask[:, -queries:] if causal or queries == 40 else real
    errors, exact = (x[real[:, None].expand_as(x)] for x in squares(backend, q, k, v, mask))
    found = ea.audit(backend, q, k, v, key_mask=mask, rows=10_000)
    assert found.rows == found.of == errors.numel()
    assert found.relative_error == pytest.approx((float((errors.sum() / exact.sum()).sqrt()),) * 3, rel=1e-9)


def test_the_default_is_64_rows_or_one_percent_with_two_of_each_head():
    backend = ea.build("exact", head_dim=8, num_heads=4)
    for tokens, batch, rows in ((100, 1, 64), (1700, 1, 68), (100, 16, 128)):
        found = ea.audit(backend, *random_qkv(batch, 4, 4, tokens, tokens, 8, 8))
        assert (found.rows, found.of) == (rows, 4 * batch * tokens)


def test_intervals_are_those_of_a_stratified_sample():
    one = Sample(np.array([1.0, 2.0, 6.0]), np.array([2.0, 4.0, 7.0]), 30)
    two = Sample(np.array([3.0, 5.0]), np.array([9.0, 4.0]), 10)
    relative = estimate([one, two])
    mean, exact = 0.75 * 3 + 0.25 * 4, 0.75 * 13 / 3 + 0.25 * 6.5
    assert relative.value == pytest.approx(math.sqrt(mean / exact))
    first, second = ((x[0] / mean - x[1] / exact).var(ddof=1) / len(x[0]) for x in (one, two))
    parts = 0.75**2 * first * (1 - 3 / 30), 0.25**2 * second * (1 - 2 / 10)
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 2 + parts[1] ** 2 / 1)
    half_width = scipy.stats.t.ppf(0.975, freedom) * math.sqrt(sum(parts)) / 2
    assert math.log(relative.value / relative.low) == pytest.approx(half_width, rel=1e-5)


@pytest.mark.parametrize(("count", "drawn"), [(10, 10), (512, 7)])
def test_every_row_is_drawn_as_often_as_any_other(count, drawn):
    generator, calls = torch.Generator().manual_seed(0), 4000
    found = torch.stack([random_positions(count, drawn, generator) for _ in range(calls)])
    share = torch.bincount(found.flatten(), minlength=count) / calls
    # A count of independent calls scatters by less than a binomial one.
    expected = drawn / count
    assert (share - expected).abs().max() <= 5 * math.sqrt(expected / calls) * (drawn < count) + 1e-12
    assert (found.diff(dim=1) >= 0).all()


def test_an_output_without_error_has_an_interval_of_zero():
    q, k, v = random_qkv()
    found = ea.audit(ea.build("exact", head_dim=8, num_heads=4), q, k, torch.zeros_like(v))
    assert found.relative_error == (0, 0, 0)
    empty = ea.audit(ea.build("exact", head_dim=8, num_heads=4), q[:, :, :0], k, v)
    assert (empty.rows, empty.of, empty.relative_error) == (0, 0, (0, 0, 0))
    # A call without keys has no error either.
    blind = ea.audit(ea.build("performer-positive", head_dim=8, num_heads=4), q, k[:, :, :0], v[:, :, :0])
    assert blind.rows == blind.of == 56 and blind.relative_error == (0.0, 0.0, 0.0)


def test_a_seed_draws_the_same_rows_and_another_seed_other_rows():
    backend = ea.build("window", head_dim=8, num_heads=4, window=5)
    inputs = random_qkv(q_tokens=99, k_tokens=99)
    first, again, other = (ea.audit(backend, *inputs, seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    value, low, high = first.relative_error
    assert str(first) == f"relative error {value:.3g} ({low:.3g} to {high:.3g}), from 64 of 792 rows"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rows": 0}, "rows is at least 1, not 0"),
        ({"rows": 1.5}, "rows is a whole number, not "),
        *(({"seed": seed}, "seed is ") for seed in (None, -1)),
    ],
)
def test_rows_and_seeds_that_are_no_counts_are_refused(settings, message):
    backend = ea.build("exact", head_dim=8, num_heads=4)
    with pytest.raises((DtypeError, OptionError), match=message):
        ea.audit(backend, *random_qkv(), **settings)


def test_rows_of_padding_are_drawn_from_the_other_entries():
    backend = ea.build("window", head_dim=8, num_heads=4, window=9)
    q, k, v = random_qkv(4, 4, 2, 100, 100)
    mask = torch.arange(100) < torch.tensor([[0], [100], [20], [80]])
    found = ea.audit(backend, q, k, v, key_mask=mask)
    # 64 rows in the ratio 100 : 20 : 80, in four heads, rounded up to whole rows of each.
    assert (found.rows, found.of) == (4 * (8 + 2 + 7), 4 * 200)
    # Padding may hold anything.
    q = q.masked_fill(~mask[:, None, :, None], float("nan"))
    assert ea.audit(backend, q, k, v, key_mask=mask) == found
    nothing = ea.audit(backend, q, k, v, key_mask=torch.zeros_like(mask))
    assert (nothing.rows, nothing.of, nothing.relative_error) == (0, 0, (0, 0, 0))


def test_values_at_the_end_of_half_precision_have_an_error_and_no_other_do():
    q, k, v = (x.half() for x in random_qkv(q_tokens=64, k_tokens=64))
    v = torch.full_like(v, 6.5e4) * v.sign()
    backend = ea.build("exact", head_dim=8, num_heads=4)
    errors, exact = (float(x.sum()) for x in squares(backend, q, k, v))
    found = ea.audit(backend, q, k, v, rows=10_000).relative_error.value
    assert 0 < found < 1e-2 and found == pytest.approx(math.sqrt(errors / exact), rel=1e-9)
    v[0, 0, 3] = float("inf")
    with pytest.raises(DataError, match="128 rows of the output are not finite"):
        ea.audit(backend, q, k, v)


def test_dropout_in_training_is_refused():
    backend, inputs = ea.build("exact", head_dim=8, num_heads=4, dropout=0.5), random_qkv()
    with pytest.raises(UnsupportedError, match="is in training mode, where dropout would be taken for an"):
        ea.audit(backend, *inputs)
    assert ea.audit(backend.eval(), *inputs).relative_error.value < 1e-12


# Simulated audits of 72 rows, the least number in 12 or 9 heads that is 64 or more.
CALLS, ROWS = 400, 72


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layer"), [("window", 0), ("performer-positive", 1), ("linear-elu", 5), ("block-topk", 19)]
)
def test_intervals_cover_the_error_of_real_rows_in_nine_calls_of_ten(name, layer):
    causal = layer == 19
    q, k, v = ea.sample(layer, 4 if causal else 0)
    (heads, count, dim), generator = q.shape[1:], torch.Generator().manual_seed(0)
    output = exact_output(q, k, v, scale=dim**-0.5, causal=causal)
    with torch.no_grad():
        error = ea.build(name, head_dim=dim, num_heads=heads, causal=causal)(q, k, v).double() - output
    errors, exact = (x.square().sum(dim=-1)[0].numpy() for x in (error, output))
    audits, truth = [], math.sqrt(errors.sum() / exact.sum())
    for _ in range(CALLS):
        drawn = [random_positions(count, ROWS // heads, generator).numpy() for _ in errors]
        rows = zip(errors, exact, drawn, strict=True)
        audits.append(estimate([Sample(a[i], b[i], count) for a, b, i in rows]))
    value, low, high = np.array(audits).T
    held = ((low <= truth) & (truth <= high)).mean()
    # Three standard errors of such a coverage.
    assert held >= 0.9 - 3 * math.sqrt(0.9 * 0.1 / CALLS)
    # The mean lies within four of its standard errors of the truth.
    squares = np.square(value)
    assert abs(squares.mean() - truth**2) <= 4 * squares.std(ddof=1) / math.sqrt(CALLS)
    assert np.median(high / low) < 6
