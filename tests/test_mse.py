"""Errors size by size: what is asked for, and what is measured."""

import pytest
import torch
from drawn import texts
from planned import points_of
from reference import reference_attention
from safetensors.torch import save_file

import efficient_attn as ea
from efficient_attn.errors import DataError, OptionError, UnknownNameError
from efficient_attn.measure.accuracy import DRAWS
from efficient_attn.measure.inputs import Activations, Subject, gaussian
from efficient_attn.measure.record import replace
from efficient_attn.measure.variants import UNIFORM_ATTENTION, sized
from efficient_attn.stats.estimates import FEWEST_FOR_95
from efficient_attn.studies import find
from efficient_attn.studies.mse.analysis import panels

SMALL = {
    "inputs": "gaussian",
    "seeds": 1,
    "seq_lens": 24,
    "head_dim": 4,
    "norms": (0.5,),
    "sizes": (4, 8),
    "draws": 3,
}
QUANTITY = "output_relative_error"


def records_of(results, backend):
    return [record for record in results.records if record.case.backend == backend]


def measured_in(results):
    """The records of backends, without the baseline."""
    return [record for record in results.records if record.case.backend != UNIFORM_ATTENTION]


def test_exact_backends_are_right_to_rounding_and_the_yardstick_stands_first():
    results = ea.mse(["exact", "exact-dense"], **SMALL)
    assert results.records[0].case.backend == UNIFORM_ATTENTION
    # Sums of 24 terms in float32, relative to an output of norm one.
    rounding = 24 * torch.finfo(torch.float32).eps
    assert all(r.output_relative_error < rounding for r in measured_in(results))
    assert results.records[0].output_relative_error > 0.01


def test_the_error_is_that_of_the_backend_on_the_inputs_named():
    (found,) = records_of(ea.mse(["window"], **{**SMALL, "sizes": (5,)}), "window")
    q, k, v = gaussian(norm=0.5, tokens=24, head_dim=4)
    exact = ((q.double() @ k.double().mT) / 2).softmax(dim=-1) @ v.double()
    output = ea.build("window", head_dim=4, window=5)(q, k, v)
    expected = float((output.double() - exact).norm() / exact.norm())
    assert found.output_relative_error == pytest.approx(expected, rel=1e-6)
    assert found.output_mse == pytest.approx(float((output.double() - exact).square().mean()), rel=1e-6)


def test_gaussian_inputs_are_drawn_at_every_length():
    lengths = {**SMALL, "seq_lens": "16,24"}
    tokens = [record.case.tokens for record in ea.mse(["exact"], **lengths).records]
    assert tokens == [16, 16, 24, 24]


def test_random_features_are_drawn_anew_for_each_draw_and_others_measured_once():
    results = ea.mse(["performer-positive", "linformer"], **SMALL)
    for found in records_of(results, "performer-positive"):
        assert len(set(found.output_relative_error_draws)) == 3
        assert found.output_relative_error == pytest.approx(sum(found.output_relative_error_draws) / 3)
        assert found.num_directions == found.case.options["num_features"]
    assert all(len(r.output_mse_draws) == 1 for r in records_of(results, "linformer"))


def test_draw_number_i_is_the_backend_built_with_seed_i():
    (found,) = records_of(ea.mse(["performer-positive"], **{**SMALL, "sizes": (8,)}), "performer-positive")
    q, k, v = gaussian(norm=0.5, tokens=24, head_dim=4)
    exact = ((q.double() @ k.double().mT) / 2).softmax(dim=-1) @ v.double()
    for seed, error in enumerate(found.output_relative_error_draws):
        output = ea.build("performer-positive", head_dim=4, num_features=8, seed=seed)(q, k, v)
        assert error == pytest.approx(float((output.double() - exact).norm() / exact.norm()), rel=1e-6)


def test_the_same_request_gives_the_same_numbers_and_another_seed_others():
    first, again, other = (ea.mse(["performer-trig"], **SMALL, seed=seed).records for seed in (0, 0, 1))
    assert [r.output_mse_draws for r in first] == [r.output_mse_draws for r in again]
    assert all(one.output_mse_draws != two.output_mse_draws for one, two in zip(first, other, strict=True))


def test_by_default_what_approximates_softmax_is_measured_and_other_kernels_when_they_are_named():
    near = {name for name in ea.list_backends() if ea.spec(name).capabilities.approximates_softmax}
    request = {**SMALL, "sizes": (8,), "draws": 1}
    assert {r.case.backend for r in measured_in(ea.mse(**request))} == near < set(ea.list_backends())
    assert [r.case.backend for r in measured_in(ea.mse(["linear-elu"], **request))] == ["linear-elu"]


def test_gaussian_inputs_have_two_seeds_by_default():
    request = {name: value for name, value in SMALL.items() if name != "seeds"}
    assert [r.case.seed for r in measured_in(ea.mse(["exact"], **request))] == [0, 1]


def test_the_draws_by_default_are_the_fewest_with_an_interval_of_95_percent():
    assert DRAWS == FEWEST_FOR_95


def test_a_size_is_recorded_as_it_was_measured_and_ranks_beyond_the_tokens_are_not_asked_for():
    results = ea.mse(**{**SMALL, "sizes": (15, 16, 32)})
    sizes = {
        name: [sized(r.case).size for r in records_of(results, name)] for name in ("window", "linformer")
    }
    assert sizes == {"window": [15, 17], "linformer": [15, 16]}
    assert [sized(r.case).size for r in records_of(results, "performer-trig")] == [16, 32]
    assert all(r.status == "ok" for r in results.records)


def test_rows_without_a_positive_denominator_are_counted_for_signed_features_alone():
    results = ea.mse(["performer-trig", "performer-positive", "window"], **{**SMALL, "norms": (3.0,)})
    assert all(0 < r.unsafe_rows <= 1 for r in records_of(results, "performer-trig"))
    assert all(r.unsafe_rows is None for r in results.records if r.case.backend != "performer-trig")


def test_the_encoder_is_measured_layer_by_layer_with_the_scale_of_its_model():
    results = ea.mse(["exact"], inputs="encoder", layers=(5, 1))
    assert [r.case.inputs for r in measured_in(results)] == ["encoder(layer=5)", "encoder(layer=1)"]
    assert all(r.output_relative_error < 1e-5 for r in measured_in(results))


def test_on_real_activations_windows_get_better_with_size_and_random_features_lose_to_uniform_attention():
    results = ea.mse(
        ["window", "performer-positive"], inputs="encoder", layers=(1,), sizes=(32, 128), draws=6
    )
    (panel,) = panels(results.records, QUANTITY)
    windows, features = panel.curves
    assert panel.yardstick == pytest.approx(0.85, abs=0.07)
    assert windows.points[1].value < windows.points[0].value < panel.yardstick
    assert all(point.low > panel.yardstick for point in features.points)


def test_by_default_the_layers_of_full_length_are_measured_and_the_decoder_causally(short_decoder):
    results = ea.mse(["exact", "window"], sizes=(3,), seq_lens=24, head_dim=4)
    encoder = {(f"encoder(layer={layer})", 512, False) for layer in (0, 1, 5)}
    gaussians = {(f"gaussian(norm={norm:g})", 24, False) for norm in (0.5, 1)}
    found = {(r.case.inputs, r.case.tokens, r.case.causal) for r in results.records}
    assert found == encoder | gaussians | {("decoder(layer=19)", short_decoder, True)}
    # Attention to later keys too would be no rounding error.
    assert all(r.output_relative_error < 1e-5 for r in records_of(results, "exact"))
    (one,) = (r for r in records_of(results, "window") if r.case.causal)
    q, k, v = (x[..., :short_decoder, :].double() for x in ea.sample(19, text=4))
    exact, near = (
        reference_attention(q, k, v, scale=1 / 8, visible=lambda i, j, back=back: 0 <= i - j < back)
        for back in (short_decoder, 3)
    )
    assert one.output_relative_error == pytest.approx(float((near - exact).norm() / exact.norm()), rel=1e-5)


def test_an_input_by_default_that_lacks_the_layer_is_left_out_and_named():
    results = ea.mse(["window"], sizes=(4,), seq_lens=24, head_dim=4, layers=(5,))
    assert {r.case.inputs for r in results.records if r.case.tokens > 24} == {"encoder(layer=5)"}
    assert "Left out: layer 5 is not in decoder; it has 18, 19." in results.notes


def test_the_shorter_layer_of_the_decoder_is_measured_where_it_is_named(short_decoder):
    results = ea.mse(["window"], inputs="decoder", layers=(18, 19), sizes=(3,))
    found = {(r.case.inputs, r.case.tokens, r.case.causal) for r in results.records}
    assert found == {
        ("decoder(layer=18)", short_decoder // 2, True),
        ("decoder(layer=19)", short_decoder, True),
    }


def test_the_pairs_of_a_causal_subject_are_those_that_attend():
    q, k = torch.zeros(1, 1, 5, 2), torch.zeros(1, 1, 5, 2)
    # Of 25 pairs 15 have a long key, of the 15 with no later key six.
    k[..., 2:, 0] = 9.0
    full = Subject("", Activations(q, k, k), 1.0)
    assert (full.pair_norm, replace(full, causal=True).pair_norm) == (81.0, 0.0)


def test_a_captured_file_is_measured_under_its_own_name_alone(tmp_path):
    q, k, v = (x[0] for x in gaussian(norm=1.0, tokens=12, head_dim=4, num_heads=2))
    path = tmp_path / "mine.safetensors"
    save_file({"q": q, "k": k, "v": v}, path, metadata={"scale": "0.25"})
    results = ea.mse(["exact"], inputs=path)
    assert results.records[0].case.inputs == "mine.safetensors(layer=0)"
    assert results.records[-1].output_relative_error < 1e-5


def test_a_function_is_measured_once_and_what_breaks_is_a_record_with_its_reason():
    def broken(q, k, v):
        raise RuntimeError("it broke\nhere")

    results = ea.mse([lambda q, k, v: v, broken], **SMALL)
    identity, failure = measured_in(results)
    assert identity.output_relative_error > 0
    assert (failure.status, failure.reason) == ("error", "RuntimeError: it broke here")
    assert any("it broke" in note for note in results.tables()[0].notes)


def test_an_option_that_is_set_keeps_its_place_in_the_label_beside_the_size():
    results = ea.mse(
        ["performer-positive", "linformer"],
        **SMALL,
        options={"performer-positive": {"projection": ["iid"]}, "linformer": {"rank": [3]}},
    )
    labels = [r.case.label for r in measured_in(results)]
    features = [f"performer-positive(projection=iid, num_features={size})" for size in (4, 8)]
    assert labels == [features[0], "linformer(rank=3)", features[1]]
    assert [curve.label for curve in panels(results.records, QUANTITY)[0].curves] == [
        "performer-positive(projection=iid)",
        "linformer",
    ]


def test_files_written_are_read_back_as_the_same_records(tmp_path):
    results = ea.mse(["window"], **SMALL, out=tmp_path / "out")
    assert ea.read(tmp_path / "out").records == results.records
    assert {"records.jsonl", "summary.csv", "environment.json", "command.txt", "error.png"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    with pytest.raises(DataError, match="holds records of another run already"):
        ea.mse(["window"], **SMALL, out=tmp_path / "out")


def test_the_median_norm_of_pairs_is_kept_with_the_run_and_their_operations_with_the_records():
    results = ea.mse(["window", "performer-positive"], **{**SMALL, "sizes": (5, 47)})
    q, k, _ = (tensor.double() for tensor in gaussian(norm=0.5, tokens=24, head_dim=4))
    pairs = (q[..., :, None, :] + k[..., None, :, :]).square().sum(-1) / 4**0.5
    kept = results.environment["pair_norms"]
    assert kept == {"gaussian(norm=0.5)": pytest.approx(float(pairs.median()), rel=1e-6)}
    assert any(sentence.startswith("Random features") for sentence in results.sentences())
    assert all(record.flops for record in measured_in(results))


def test_a_figure_of_a_paper_is_a_setting_of_its_own_and_takes_no_other():
    plan = find("mse").plan(figure="performer-fig2")
    cases = [point.case for point in points_of(plan)]
    assert {case.of for case in cases} == {"kernel"} and {case.backend for case in cases} == {
        "performer-trig",
        "performer-positive",
    }
    with pytest.raises(OptionError, match="sizes has no effect on performer-fig4; leave it out"):
        find("mse").plan(figure="performer-fig4", sizes=(8,))
    with pytest.raises(UnknownNameError, match="figure"):
        find("mse").plan(figure="performer-fig5")


def test_the_predicted_duration_weighs_points_by_their_operations():
    asked = {"inputs": "gaussian", "norms": (1.0,), "seq_lens": 512, "head_dim": 4, "sizes": (16, 64)}
    plan = find("mse").plan(["performer-positive", "exact"], **asked)
    costs = {point.case.label: point.cost for point in points_of(plan)}
    small, large = (costs[f"performer-positive(num_features={size})"] for size in (16, 64))
    assert small < large < 4 * small
    assert len({point.series for point in points_of(plan)}) < len(points_of(plan))


@pytest.mark.parametrize(
    ("metric", "quantities"), [("relative", ["output_mse", QUANTITY]), ("mse", ["output_mse"])]
)
def test_records_tables_and_plots_hold_the_metric(metric, quantities):
    results = ea.mse(["performer-positive"], **SMALL, metric=metric)
    shown = QUANTITY if metric == "relative" else "output_mse"
    for record in results.records:
        assert [name for name in ("output_mse", QUANTITY) if getattr(record, name) is not None] == quantities
    assert len(getattr(results.records[-1], f"{shown}_draws")) == 3
    title = results.tables()[0].title.partition(":")[0]
    assert results.plot().get_ylabel().replace("\n", " ") == title.lower()


def test_the_interval_over_several_seeds_of_the_inputs_is_that_of_their_medians():
    results = ea.mse(["performer-positive"], **{**SMALL, "sizes": (64,), "draws": 8, "seeds": 3})
    records = [r for r in results.records if r.case.backend == "performer-positive"]
    assert [r.case.seed for r in records] == [0, 1, 2]
    (panel,) = panels(results.records, QUANTITY)
    (point,) = panel.curves[0].points
    medians = sorted(float(torch.tensor(r.output_relative_error_draws).quantile(0.5)) for r in records)
    assert point.samples == 3
    assert (point.low, point.value, point.high) == pytest.approx(medians)
    assert "±: median of 3 seeds of the inputs and its range." in results.tables()[0].notes
    assert "bands: median of 3 seeds of the inputs and its range" in texts(results.plot().figure)


def test_a_single_draw_has_no_interval():
    notes = ea.mse(["performer-trig"], **{**SMALL, "draws": 1}).tables()[0].notes
    assert not any(note.startswith("±") for note in notes)


def test_the_interval_over_draws_on_one_seed_of_the_inputs_says_that_it_is_over_draws_alone():
    results = ea.mse(["performer-positive"], **{**SMALL, "draws": 6})
    (note,) = (note for note in results.tables()[0].notes if note.startswith("±"))
    assert note.startswith("±: median of 6 draws and its 95 % interval, over draws alone")
    assert "over draws alone" in texts(results.plot().figure).replace("\n", " ")


def test_a_case_that_a_plan_names_twice_is_measured_once():
    twice = {**SMALL, "norms": (1.0, 1.0), "sizes": (16, 17), "seq_lens": 32}
    keys = [record.case.key for record in ea.mse(["window"], **twice).records]
    assert keys and len(keys) == len(set(keys))
