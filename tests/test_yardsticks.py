"""Yardsticks and metrics: what errors are read beside, by which measure, for which head, over which draws."""

import pytest
import torch
from drawn import texts

import efficient_attn as ea
from efficient_attn.measure import yardsticks
from efficient_attn.measure.inputs import gaussian
from efficient_attn.runner.sizes import ORACLE, TAYLOR
from efficient_attn.runner.yardsticks import ranks_of
from efficient_attn.studies.mse.analysis import panels

SMALL = {"inputs": "gaussian", "seq_len": 24, "head_dim": 4, "norms": (0.5,), "sizes": (4, 8), "draws": 3}
RELATIVE = "output_relative_error"


@pytest.fixture
def weights():
    q, k, _ = gaussian(norm=1.0, tokens=40, head_dim=8, num_heads=2, dtype=torch.float64)
    return yardsticks.exact_weights(q, k, scale=8**-0.5)


def test_the_low_rank_yardstick_is_the_nearest_matrix_of_its_rank(weights):
    u, s, vh = torch.linalg.svd(weights)
    for rank in (1, 5, 39):
        nearest = (u[..., :rank] * s[..., None, :rank]) @ vh[..., :rank, :]
        found = yardsticks.low_rank_weights(weights, yardsticks.leading_directions(weights, rank))
        torch.testing.assert_close(found, nearest, rtol=0, atol=1e-10)


def test_subspace_iteration_stays_close_to_the_nearest_matrix(weights, monkeypatch):
    least = torch.linalg.svdvals(weights)[..., 5:].square().sum().sqrt()
    monkeypatch.setattr(yardsticks, "_EXACT_TOKENS", 1)
    found = yardsticks.low_rank_weights(weights, yardsticks.leading_directions(weights, 5))
    ratio = float((found - weights).norm() / least)
    # Never below the least error, float32 aside, and near it with 16 directions to spare.
    assert 1 - 1e-5 < ratio < 1.01


def test_a_low_rank_output_is_that_of_its_weights(weights):
    v = torch.randn(1, 1, 40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    directions = yardsticks.leading_directions(weights, 6)
    expected = yardsticks.low_rank_weights(weights, directions) @ v
    torch.testing.assert_close(yardsticks.low_rank_output(weights, directions, v), expected)


@pytest.mark.parametrize("order", [1, 2])
def test_taylor_weights_are_the_series_over_its_row_sums(order):
    q, k, v = gaussian(norm=0.5, tokens=9, head_dim=4, dtype=torch.float64)
    z = 0.5 * q @ k.mT
    terms = sum(z**n / (1, 1, 2)[n] for n in range(order + 1))
    expected = terms / terms.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(yardsticks.taylor_weights(q, k, scale=0.5, order=order), expected)
    torch.testing.assert_close(yardsticks.taylor_output(q, k, v, scale=0.5, order=order), expected @ v)
    # As a linear attention: one, the entries, and the products of each pair of entries once.
    assert yardsticks.taylor_features(4, order) == {1: 5, 2: 15}[order]


def test_every_input_has_its_yardsticks_in_records_table_and_plot():
    results = ea.mse(["window"], **SMALL)
    names = [r.case.label for r in results.records[:5]]
    series = [f"Taylor order {order}" for order in (1, 2)]
    assert names == ["mean of V", *series, *(f"rank-r SVD(rank={r})" for r in (4, 8))]
    assert [row[0] for row in results.tables()[0].rows[:4]] == ["mean of V", *series, ORACLE]
    legend = [text.get_text() for text in results.plot().figure.legends[0].get_texts()]
    assert {"uniform-attention baseline", *series, ORACLE} <= set(legend)
    (panel,) = panels(results.records, RELATIVE)
    oracle = next(curve for curve in panel.others if curve.backend == ORACLE)
    assert oracle.points[1].value < oracle.points[0].value < panel.yardstick


def test_on_short_vectors_the_second_taylor_order_errs_least():
    (panel,) = panels(ea.mse(["exact"], **{**SMALL, "norms": (0.3,)}).records, RELATIVE)
    first, second = (curve.points[0].value for curve in panel.others if curve.backend == TAYLOR)
    assert second < first < panel.yardstick


def test_a_matrix_too_large_for_a_yardstick_is_said(monkeypatch):
    monkeypatch.setattr(yardsticks, "_MOST_ENTRIES", 24 * 24 - 1)
    results = ea.mse(["window"], **SMALL)
    failed = [r for r in results.records if r.status != "ok"]
    assert {r.case.backend for r in failed} == {ORACLE}
    assert "576 entries are more than 575" in failed[0].reason


@pytest.mark.parametrize(
    ("metric", "quantity"),
    [
        ("relative", RELATIVE),
        ("mse", "output_mse"),
        ("frobenius", "weights_relative_error"),
        ("kl", "weights_row_kl"),
    ],
)
def test_a_metric_alone_is_what_records_tables_and_plots_hold(metric, quantity):
    results = ea.mse(["performer-positive"], **SMALL, metric=metric)
    known = ("output_mse", RELATIVE, "weights_relative_error", "weights_row_kl")
    for record in results.records:
        held = [name for name in known if getattr(record, name) is not None]
        assert held == [quantity] or (record.case.backend == ORACLE and record.status == "unsupported")
    assert len(getattr(results.records[-1], f"{quantity}_draws")) == 3
    title = results.tables()[0].title.partition(":")[0]
    assert results.plot().get_ylabel().replace("\n", " ") == title.lower()


def test_the_divergence_of_a_window_is_not_defined_and_said():
    (record,) = ea.mse(["window"], **{**SMALL, "sizes": (4,)}, metric="kl").records[-1:]
    assert (record.status, record.weights_row_kl) == ("unsupported", None)
    assert "some weights are zero or negative" in record.reason


def test_rows_without_a_positive_sum_are_a_metric_of_signed_features():
    results = ea.mse(["performer-trig", "window"], **{**SMALL, "norms": (3.0,)}, metric="unsafe")
    trig, window = results.records[1], results.records[-1]
    assert 0 < trig.unsafe_rows <= 1 and trig.output_mse is None
    assert window.status == "unsupported" and "has no random features" in window.reason
    assert "sum is zero or negative" in results.tables()[0].title


def test_inputs_and_features_vary_apart():
    results = ea.mse(["performer-positive"], **{**SMALL, "sizes": (64,), "draws": 8}, data_seeds=3)
    records = [r for r in results.records if r.case.backend == "performer-positive"]
    assert [r.case.seed for r in records] == [0, 1, 2]
    (panel,) = panels(results.records, RELATIVE)
    (point,) = panel.curves[0].points
    medians = sorted(float(torch.tensor(r.output_relative_error_draws).quantile(0.5)) for r in records)
    assert (point.draws, point.data_seeds) == (8, 3)
    assert (point.data_low, point.value, point.data_high) == pytest.approx(medians)
    assert point.low < point.value < point.high
    notes = " ".join(results.tables()[0].notes)
    assert "medians of 8 draws; ± is the 95 % interval over draws" in notes
    assert "medians of 3 seeds of the inputs; their range is at most" in notes
    assert "bars: range over 3 seeds of the inputs" in texts(results.plot().figure)


def test_a_single_draw_is_said_to_tell_nothing_of_others():
    notes = ea.mse(["performer-trig"], **{**SMALL, "draws": 1}).tables()[0].notes
    assert any("one draw, and no measure of the distance of another one" in note for note in notes)


def test_ranks_of_long_sequences_end_where_they_would_take_longest():
    assert ranks_of((16, 256, 512, 1024), 1024) == [16, 256, 512]
    assert ranks_of((16, 256, 512, 1024), 4096) == [16, 256]
