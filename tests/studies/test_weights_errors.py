"""Errors of attention weights beside their floor: what is measured, and how it is shown."""

import pytest
import torch
from synthetic_records import case

import efficient_attn as ea
from efficient_attn.measure import accuracy
from efficient_attn.measure.accuracy import WEIGHTED_TOKENS
from efficient_attn.measure.inputs import subjects
from efficient_attn.measure.record import Record, replace
from efficient_attn.measure.variants import UNIFORM_ATTENTION, select, sized

SMALL = {"of": "weights", "inputs": "gaussian", "seq_lens": 24, "head_dim": 4, "norms": (0.5,), "draws": 3}
FLOOR, UNBIASED = "floor of rank-m weights", "best unbiased estimate"


def weights_record(label, size, error, floor, *, inputs="encoder(layer=5)", unbiased=0.2):
    options = {"num_features": size}
    about = case("error", f"{label}(num_features={size})", 24, of="weights", inputs=inputs, options=options)
    bounds = {"weights_rank": size, "weights_floor": floor, "weights_unbiased_error": unbiased}
    draws = {"weights_relative_error": error, "weights_relative_error_draws": (error,)}
    return Record(case=about, **draws, **bounds)


def shown(*records):
    return ea.Results(records, environment={"study": "mse"})


def test_errors_are_relative_norms_of_each_head_over_draws_of_the_features():
    results = ea.mse(["performer-positive", "window"], **SMALL, sizes=(8,))
    uniform, features, window = results.records
    q, k, _ = (x.double() for x in subjects(["gaussian"], norms=[0.5], tokens=24, head_dim=4)[0].activations)
    exact = (q @ k.mT / 2).softmax(dim=-1)[0, 0]
    expected = []
    for seed in range(3):
        backend = ea.build("performer-positive", head_dim=4, num_features=8, seed=seed).double()
        expected.append(float((backend.attention_weights(q, k)[0, 0] - exact).norm() / exact.norm()))
    assert features.weights_relative_error_draws == pytest.approx(expected, rel=1e-9)
    assert features.case.dtype == "float64" and features.output_relative_error is None
    values = torch.linalg.svdvals(exact)
    floor = float(values[8:].norm() / values.norm())
    assert (features.weights_rank, window.weights_rank) == (8, None)
    assert features.weights_floor == pytest.approx(floor, rel=1e-9)
    unbiased = float(((values.sum() ** 2 / values.square().sum() - 1) / 8).sqrt())
    assert features.weights_unbiased_error == pytest.approx(unbiased, rel=1e-9)
    mean = float((1 / 24 - exact).norm() / exact.norm())
    assert uniform.weights_relative_error == pytest.approx(mean, rel=1e-9)


def test_a_longer_input_is_measured_at_its_first_tokens_causal_as_it_is():
    (layer,) = subjects(["decoder"], layers=[19])
    first = layer.with_unit_values(WEIGHTED_TOKENS)
    assert (first.tokens, first.causal, first.name) == (512, True, "decoder(layer=19)")
    assert torch.equal(first.activations.q, layer.activations.q[..., :512, :].double())
    assert first.exact.triu(1).count_nonzero() == 0 and len(first.spectra) > 1


def test_each_head_counts_alike():
    (layer,) = subjects(["encoder"], layers=[0])
    first = layer.with_unit_values(WEIGHTED_TOKENS)
    spread = first.exact.square().sum(dim=(-2, -1))
    # Otherwise a few heads with large norms would hide the others.
    assert spread.max() > 5 * spread.min()
    (uniform, *_) = ea.mse(["exact"], of="weights", inputs="encoder", layers=[0]).records
    errors = (first.exact - 1 / 512).square().sum(dim=(-2, -1)) / spread
    assert uniform.weights_relative_error == pytest.approx(float(errors.mean().sqrt()), rel=1e-9)


def test_causal_weights_have_a_floor_and_no_unbiased_estimate():
    layer = replace(subjects(["decoder"], layers=[19])[0].with_unit_values(40), name="short")
    record = accuracy.measure_error(select(["performer-positive"])[0], layer, of="weights", draws=1)
    assert record.weights_floor is not None and record.weights_unbiased_error is None


def test_floor_and_best_unbiased_estimate_are_rows_and_lines_and_causal_weights_have_no_estimate():
    full = [weights_record("performer-full", 8, 0.7, 0.1), weights_record("performer-full", 16, 0.6, 0.002)]
    causal = [
        weights_record("performer-full", size, 0.9, 0.05, inputs="decoder(layer=19)", unbiased=None)
        for size in (8, 16)
    ]
    results = shown(*full, *causal)
    first, second = results.tables()
    assert first.title.startswith("Relative error of the attention weights: encoder, layer 5")
    assert {row[0]: row[1:] for row in first.rows}[FLOOR] == ("0.1", "0.002")
    assert [row[0] for row in second.rows] == ["performer-full", FLOOR]
    plot = results.plots()["error"]
    lines = [{line.label: line for line in chart.series} for chart in plot.charts]
    assert (lines[0][FLOOR].x, lines[0][FLOOR].y) == ([8, 16], [0.1, 0.002])
    assert lines[0][UNBIASED].style["linestyle"] == "--" and UNBIASED not in lines[1]
    assert "no unbiased estimate of causal weights" in plot.conditions


def test_the_sentence_names_the_floor_of_the_largest_rank_and_its_nearest_backend():
    records = [
        weights_record("performer-full", 16, 0.735, 0.002),
        weights_record("performer-trig", 16, 7.0, 0.002),
        # Weights of this rank can be exact.
        weights_record("performer-full", 32, 0.5, 1e-9),
        weights_record("performer-full", 16, 0.1, 0.05, inputs="gaussian(norm=1)"),
    ]
    sentence = "encoder, layer 5: no map of 16 features below 0.002 (performer-full 0.73)."
    assert shown(*records).sentences()[0] == f"Error of the attention weights. {sentence}"


def test_a_row_of_bounds_is_never_the_smallest_error():
    records = [weights_record(name, 8, error, 0.1) for name, error in (("a", 0.7), ("b", 0.6))]
    (table,) = shown(*records).tables()
    assert [table.rows[row][0] for row, _ in table.best] == ["b"]


def test_a_benchmark_names_the_floor_of_its_nearest_backend():
    records = ea.bench(
        ["exact", "performer-full"], inputs="encoder", layers=[1], seq_lens=32, rounds=1, isolate="none"
    ).records
    errors = [r for r in records if r.case.kind == "error"]
    floors = {r.case.backend: (r.weights_rank, r.weights_floor) for r in errors}
    assert floors["exact"] == (None, None) and floors[UNIFORM_ATTENTION][0] == 1
    rank, floor = floors["performer-full"]
    assert rank == 256 and floor == 0.0
    ranked = [replace(r, weights_floor=0.002) if r.weights_rank == 256 else r for r in errors]
    text = " ".join(ea.Results(ranked, environment={"study": "bench"}).sentences())
    assert "weights of rank 256 cannot err less than 0.002)" in text
    silent = " ".join(ea.Results(errors, environment={"study": "bench"}).sentences())
    assert "performer-full" in silent and "cannot err" not in silent


def test_the_size_of_a_backend_with_a_rank_is_its_rank():
    records = ea.mse(["linformer", "performer-trig", "nystrom", "linear-elu"], **SMALL, sizes=(4,)).records
    ranks = {r.case.backend: (sized(r.case).size, r.weights_rank) for r in records[1:]}
    sizes = dict.fromkeys(["linformer", "performer-trig", "nystrom"], (4, 4))
    assert ranks == sizes | {"linear-elu": (None, 4)}


def test_a_benchmark_names_the_nearest_backend_with_a_floor_beside_one_without_a_rank():
    setting = {"inputs": "encoder", "layers": [1], "seq_lens": 32, "rounds": 1, "isolate": "none"}
    results = ea.bench(["exact", "window", "performer-full"], options={"window": {"window": [49]}}, **setting)
    errors = [r for r in results.records if r.case.kind == "error"]
    ranked = [replace(r, weights_floor=0.002) if r.weights_rank == 256 else r for r in errors]
    text = " ".join(ea.Results(ranked, environment={"study": "bench"}).sentences())
    assert "Closest: window(window=49) (error " in text
    assert "). Of limited rank: performer-full (error " in text and "cannot err less than 0.002)" in text
