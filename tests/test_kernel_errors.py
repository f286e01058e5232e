"""The error of a kernel entry: measured over theory, said where it cannot be, drawn with its yardsticks."""

import math

import pytest
import torch
from drawn import texts

import efficient_attn as ea
from efficient_attn.errors import OptionError, UnsupportedError
from efficient_attn.measure.record import replace
from efficient_attn.studies.mse.kernel import PAIRS, pairs
from efficient_attn.studies.mse.kernel_view import entries, entry_panels

RANDOM = ["performer-positive", "performer-hyperbolic", "performer-trig", "performer-oprf", "performer-full"]
STANDARD_ERRORS = 4.5


def test_pairs_have_the_norm_and_angle_that_was_asked_for():
    q, k, _ = pairs(norm=0.7, angle=120, head_dim=9, seed=0)
    x, y = q[0, 0] / 9**0.25, k[0, 0] / 9**0.25
    norms = torch.full((PAIRS,), 0.7, dtype=torch.float64)
    torch.testing.assert_close((x.norm(dim=-1), y.norm(dim=-1)), (norms, norms))
    torch.testing.assert_close((x * y).sum(dim=-1), norms**2 * math.cos(math.radians(120)))


ONE_ENTRY = {"of": "kernel", "sizes": (8,), "norms": (0.5,), "angles": (90,), "draws": 2}


@pytest.mark.parametrize("projection", ["iid", "orthogonal", "simplex"])
@pytest.mark.parametrize("head_dim", [4, 8, 16, 64])
def test_measured_errors_are_those_of_theory(projection, head_dim):
    results = ea.mse(
        RANDOM,
        of="kernel",
        sizes=(32,),
        norms=(0.5,),
        angles=(100,),
        head_dim=head_dim,
        draws=24,
        options={name: {"projection": [projection]} for name in RANDOM},
    )
    (panel,) = entry_panels(results.records)
    assert [curve.backend for curve in panel.curves] == RANDOM
    for label, (point,) in entries(panel).items():
        silent = label.startswith("performer-full") and projection != "iid"
        assert (point.expected is None) == silent
        if point.deviation is not None:
            assert abs(point.deviation) < STANDARD_ERRORS, label


def test_an_error_that_so_many_draws_cannot_tell_is_said_beside_theory():
    results = ea.mse(
        ["performer-positive", "performer-trig"], of="kernel", sizes=(16,), norms=(1.5,), angles=(60,)
    )
    lost, found = results.records
    assert (lost.status, lost.kernel_mse) == ("skipped", None)
    assert "would come out too small" in lost.reason
    # Lemma 2 of Choromanski et al. with |x + y|² = 3 · 1.5², for one block of 16 directions a little less.
    assert 0.5 < lost.expected_kernel_mse / lost.kernel_value**2 / (math.expm1(6.75) / 16) < 1
    assert found.status == "ok" and found.kernel_value == pytest.approx(math.exp(1.5**2 / 2))
    table = results.tables()[0]
    (positive, trigonometric) = table.rows
    assert positive[1].startswith("(") and "×" in trigonometric[1]
    assert "mean of 64 draws, 95 % interval, where they suffice" in texts(results.plot().figure)


def test_the_plot_has_a_chart_for_each_norm_and_angle(tmp_path):
    results = ea.mse(
        ["performer-trig"], of="kernel", sizes=(8, 16), norms=(0.5, 1), angles=(90, 120), draws=4, head_dim=4,
        out=tmp_path / "out",
    )  # fmt: skip
    assert {"kernel_mse.png", "report.html"} <= {path.name for path in (tmp_path / "out").iterdir()}
    panels = entry_panels(results.records)
    places = [f"pair(norm={norm}, angle={angle})" for norm in ("0.5", "1") for angle in (90, 120)]
    assert [panel.inputs for panel in panels] == places
    assert [[one.size for line in entries(panel).values() for one in line] for panel in panels] == [
        [8, 16]
    ] * 4
    figure = results.plot("kernel_mse").figure
    assert len(figure.axes) == 4
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["performer-trig"]
    assert ea.read(tmp_path / "out").records == results.records


def test_by_default_only_what_estimates_the_kernel_is_measured_and_others_are_refused_by_name():
    small = {"sizes": (8,), "norms": (0.5,), "angles": (90,), "draws": 2, "head_dim": 4}
    assert {r.case.backend for r in ea.mse(of="kernel", **small).records} == set(RANDOM)
    window, relu = ea.mse(["window", "linear-relu"], of="kernel", **{**small, "sizes": (9,)}).records
    assert (window.status, relu.status) == ("unsupported", "unsupported")
    assert "has no features that estimate the softmax kernel" in window.reason
    assert "of another kernel than that of softmax" in relu.reason
    with pytest.raises(OptionError, match="angle is from 0 to 180 degrees, not 181"):
        ea.mse(of="kernel", **{**small, "angles": (181,)})
    with pytest.raises(UnsupportedError, match="'exact' has no features"):
        ea.build("exact", head_dim=4).kernel_ratios(*torch.zeros(2, 1, 1, 3, 4))


def test_what_is_calibrated_is_calibrated_on_the_pairs_and_the_record_says_so():
    (record,) = ea.mse(
        ["performer-oprf"], of="kernel", sizes=(8,), norms=(0.5,), angles=(90,), draws=2
    ).records
    assert record.calibrated_on == "the inputs measured"


def test_a_record_without_an_entry_or_a_size_is_left_out_of_lines():
    (record,) = ea.mse(
        ["performer-trig"], of="kernel", sizes=(8,), norms=(0.5,), angles=(90,), draws=2
    ).records
    sizeless = replace(record, case=replace(record.case, label="performer-trig"))
    for strange in (sizeless, replace(record, kernel_value=0.0)):
        assert (
            entry_panels([strange]) == ()
            and ea.Results([strange], environment={"study": "mse"}).tables() == []
        )
