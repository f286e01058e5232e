"""Errors size by size: what is asked for, and what is measured."""

import pytest
import torch
from reference import reference_attention
from study_points import points_of, study

import efficient_attn as ea
from efficient_attn.errors import OptionError, UnknownNameError
from efficient_attn.measure import accuracy
from efficient_attn.measure.error import read_shares
from efficient_attn.measure.inputs import gaussian
from efficient_attn.measure.record import replace
from efficient_attn.measure.variants import UNIFORM_ATTENTION, sized
from efficient_attn.report.text import deviation_table
from efficient_attn.stats.estimates import bland
from efficient_attn.studies.mse.view import panels

SMALL = {"inputs": "gaussian", "seq_lens": 24, "head_dim": 4, "norms": (0.5,), "sizes": (4, 8), "draws": 3}


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


@pytest.mark.parametrize(
    ("name", "size", "seed"), [("window", 5, 0), ("performer-positive", 8, 0), ("performer-positive", 8, 3)]
)
def test_draw_number_i_is_the_error_of_the_backend_built_with_the_ith_seed(name, size, seed):
    results = ea.mse([name], **{**SMALL, "sizes": (size,), "seq_lens": "16,24"}, seed=seed)
    _, found = records_of(results, name)
    q, k, v = gaussian(norm=0.5, tokens=24, head_dim=4, seed=seed)
    exact = ((q.double() @ k.double().mT) / 2).softmax(dim=-1) @ v.double()
    errors = []
    # Only what is random is drawn several times.
    for draw in range(3 if name == "performer-positive" else 1):
        chosen = {"window": size} if name == "window" else {"num_features": size, "seed": seed + draw}
        errors.append(ea.build(name, head_dim=4, **chosen)(q, k, v).double() - exact)
    relative = [float(error.norm() / exact.norm()) for error in errors]
    assert found.output_relative_error_draws == pytest.approx(relative, rel=1e-6)
    assert found.output_relative_error == pytest.approx(sum(relative) / len(relative))
    assert found.output_mse_draws == pytest.approx([float(e.square().mean()) for e in errors], rel=1e-6)


def test_a_size_is_recorded_as_it_was_measured_and_ranks_beyond_the_tokens_are_not_asked_for():
    results = ea.mse(**{**SMALL, "sizes": (15, 16, 32)})
    sizes = {
        name: [sized(r.case).size for r in records_of(results, name)] for name in ("window", "linformer")
    }
    assert sizes == {"window": [15, 17], "linformer": [15, 16]}
    assert [sized(r.case).size for r in records_of(results, "performer-trig")] == [16, 32]
    assert all(r.status == "ok" for r in results.records)


def test_density_and_covered_mass_are_those_of_the_sampled_queries(monkeypatch):
    monkeypatch.setattr(accuracy, "MOST_COMPARED", 8)
    monkeypatch.setattr(accuracy, "SAMPLED_QUERIES", 8)
    results = ea.mse(["exact", "window", "performer-positive"], **{**SMALL, "sizes": (5,)})
    (near,), (summary,) = (records_of(results, name) for name in ("window", "performer-positive"))
    q, k, _ = gaussian(norm=0.5, tokens=24, head_dim=4)
    window = ea.build("window", head_dim=4, window=5)
    shares = read_shares(window, q, k, accuracy.sampled_queries(24, 0))
    assert (near.density, near.covered_mass) == shares and 0.1 < near.density < 0.25
    assert summary.status == "ok" and summary.density is summary.covered_mass is None


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


def test_an_option_that_is_set_keeps_its_place_in_the_label_beside_the_size():
    options = {"performer-positive": {"projection": ["iid"]}, "linformer": {"rank": [3]}}
    results = ea.mse(["performer-positive", "linformer"], **SMALL, options=options)
    labels = [r.case.label for r in measured_in(results)]
    features = [f"performer-positive(projection=iid, num_features={size})" for size in (4, 8)]
    assert labels == [features[0], "linformer(rank=3)", features[1]]
    (panel,) = panels(results.records, "output_relative_error")
    assert list(panel.curves) == ["performer-positive(projection=iid)", "linformer"]


def test_a_figure_of_a_paper_is_a_setting_of_its_own_and_takes_no_other():
    points = points_of(study("mse", figure="performer-fig2"))
    backends = ("performer-trig", "performer-positive")
    assert {(x.case.of, x.case.backend) for x in points} == {("kernel", name) for name in backends}
    with pytest.raises(OptionError, match="sizes has no effect on performer-fig4; leave it out"):
        study("mse", figure="performer-fig4", sizes=(8,))
    with pytest.raises(UnknownNameError, match="figure"):
        study("mse", figure="performer-fig5")


def test_records_tables_and_plots_hold_the_metric():
    results = ea.mse(["performer-positive"], **SMALL, metric="mse")
    assert all(r.output_mse is not None and r.output_relative_error is None for r in results.records)
    title = results.tables()[0].title.partition(":")[0]
    assert results.plot().get_ylabel().replace("\n", " ") == title == "MSE of the output"


def shrunk(name, share):
    """An output that deviates from uniform attention by a share of the backend's deviation."""

    def attend(q, k, v):
        backend = ea.build(name, head_dim=q.shape[-1])
        uniform = v.mean(dim=2, keepdim=True)
        return uniform + share * (backend(q, k, v) - uniform)

    attend.__name__ = f"{name}_times_{share:g}".replace("-", "_").replace(".", "")
    return attend


def test_a_shrunk_output_errs_less_keeps_its_correlation_and_is_called_bland():
    variants = [shrunk("performer-positive", share) for share in (0.7, 0.5)]
    names = ["performer-positive", "linformer", *variants, shrunk("exact", 0.7)]
    results = ea.mse(names, inputs="encoder", layers=[5], sizes=(256,), draws=1, column="corr")
    positive, _, shorter, flat, exact = measured_in(results)
    for record in (shorter, flat):
        assert record.output_relative_error < positive.output_relative_error
        assert record.output_correlation == pytest.approx(positive.output_correlation, rel=1e-4)
    assert [bland(r) for r in (positive, shorter, flat, exact)] == [False, False, True, True]
    assert exact.output_correlation == pytest.approx(1.0)
    table = next(table for table in results.tables() if not table.detail)
    # Best by correlation, although it is far from exact.
    rows = [row[0] for row in table.rows]
    assert (rows.index(exact.case.label), len(table.columns) - 1) in table.best
    details = next(table for table in results.tables() if table.detail)
    found = {row[0] for row in details.rows if row[-1] == "bland"}
    assert {flat.case.label, exact.case.label} <= found and not found & {
        positive.case.label,
        shorter.case.label,
    }


FIXED = "performer-positive(norms=fixed)"


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ((4, 16), f"{FIXED} errs less than norms=chi on gaussian, norm 0.5 (up to 16)."),
        ((16, 1024), f"norms=chi errs less than {FIXED} from 1024 features on gaussian, norm 0.5."),
    ],
)
def test_the_size_from_which_unbiased_features_are_nearer_is_named(sizes, sentence):
    options = {"performer-positive": {"norms": ["chi", "fixed"]}}
    setting = {**SMALL, "sizes": sizes, "draws": 12}
    results = ea.mse(["performer-positive"], **setting, options=options)
    (panel,) = panels(results.records, "output_relative_error")
    nearer = [chi.value < fixed.value for chi, fixed in zip(*panel.curves.values(), strict=True)]
    assert nearer == [False, sizes[-1] == 1024]
    assert sentence in results.sentences()


@pytest.mark.parametrize("heads", ["no JSON", "[1, 2]", '[[1, "c"]]'])
def test_a_damaged_record_has_a_row_of_deviations_without_the_lost_numbers(heads):
    record = ea.mse(["window"], **SMALL).records[-1]
    values = {"output_by_head": heads, "output_relative_error_draws": None}
    (table,) = deviation_table([replace(record, **values)], "output_relative_error")
    assert table.rows[0][1] == table.rows[0][5] == "–"
