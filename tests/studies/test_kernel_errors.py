"""The error of a kernel entry: measured over theory, and said where it cannot be."""

import math

import numpy as np
import pytest
import torch

import efficient_attn as ea
from efficient_attn.errors import OptionError, UnsupportedError
from efficient_attn.measure.record import Record, replace
from efficient_attn.runs.store import OVER_BUDGET
from efficient_attn.studies.mse.kernel import PAIRS, pairs
from efficient_attn.studies.mse.kernel_view import WIDE, entry_of

RANDOM = ["performer-positive", "performer-hyperbolic", "performer-trig", "performer-oprf", "performer-full"]
STANDARD_ERRORS = 4.5
ONE_ENTRY = {"of": "kernel", "sizes": (8,), "norms": (0.5,), "angles": (90,), "draws": 2, "head_dim": 4}


def test_pairs_have_the_norm_and_angle_that_was_asked_for():
    q, k, _ = pairs(norm=0.7, angle=120, head_dim=9, seed=0).activations
    x, y = q[0, 0] / 9**0.25, k[0, 0] / 9**0.25
    norms = torch.full((PAIRS,), 0.7, dtype=torch.float64)
    torch.testing.assert_close((x.norm(dim=-1), y.norm(dim=-1)), (norms, norms))
    torch.testing.assert_close((x * y).sum(dim=-1), norms**2 * math.cos(math.radians(120)))


@pytest.mark.parametrize("projection", ["iid", "orthogonal", "simplex"])
def test_measured_errors_are_those_of_theory(projection):
    options = {name: {"projection": [projection]} for name in RANDOM}
    sizes = {"sizes": (32,), "angles": (100,), "head_dim": 64, "draws": 24}
    records = ea.mse(RANDOM, options=options, **{**ONE_ENTRY, **sizes}).records
    silent = [r.case.backend for r in records if r.expected_kernel_mse is None]
    closed = {"iid": [], "orthogonal": ["performer-full"], "simplex": RANDOM}
    assert silent == closed[projection]
    for entry in map(entry_of, records):
        if entry.draws and entry.expected is not None:
            most = STANDARD_ERRORS * (entry.high - entry.value) / WIDE
            assert abs(entry.value - entry.expected) < most, entry.label


def test_an_error_that_so_many_draws_cannot_tell_is_said_beside_theory():
    names = ["performer-positive", "performer-trig", "performer-full"]
    results = ea.mse(names, of="kernel", sizes=(16,), norms=(1.5,), angles=(60,))
    lost, told, _ = results.records
    assert (lost.status, lost.kernel_mse) == ("skipped", None)
    (table,) = results.tables()
    assert table.notes[-2:] == (
        "~: theory; 64 draws are too few here.",
        "performer-full: no theory; 64 draws are too few here.",
    )
    # Lemma 2 of Choromanski et al. with |x + y|² = 3 · 1.5², for one block of 16 directions a little less.
    assert 0.5 < lost.expected_kernel_mse / lost.kernel_value**2 / (math.expm1(6.75) / 16) < 1
    assert told.status == "ok" and told.kernel_value == pytest.approx(math.exp(1.5**2 / 2))


def test_by_default_only_what_estimates_the_kernel_is_measured_and_others_are_refused_by_name():
    records = ea.mse(**ONE_ENTRY).records
    usual = {"performer-positive", "performer-trig", "performer-hyperbolic"}
    assert {record.case.backend for record in records} == usual < set(RANDOM)
    (calibrated,) = ea.mse(["performer-full"], **ONE_ENTRY).records
    assert calibrated.calibrated_on == "the inputs measured"
    window, relu = ea.mse(["window", "linear-relu"], **{**ONE_ENTRY, "sizes": (9,)}).records
    assert (window.status, relu.status) == ("unsupported", "unsupported")
    assert "has no features that estimate the softmax kernel" in window.reason
    assert "of another kernel than that of softmax" in relu.reason
    with pytest.raises(OptionError, match="angle is from 0 to 180 degrees, not 181"):
        ea.mse(**{**ONE_ENTRY, "angles": (181,)})
    with pytest.raises(UnsupportedError, match="'exact' has no features"):
        ea.build("exact", head_dim=4).kernel_ratios(*torch.zeros(2, 1, 1, 3, 4))


@pytest.mark.parametrize("projection", ["iid", "orthogonal"])
def test_the_line_of_theory_passes_through_the_errors_expected_at_the_pairs(projection):
    maps = ["performer-positive", "performer-hyperbolic", "performer-trig"]
    options = {name: {"projection": [projection]} for name in maps}
    results = ea.mse(maps, **{**ONE_ENTRY, "sizes": (8, 12), "angles": (40, 90.5, 140)}, options=options)
    (chart,) = results.plots()["kernel_mse"].charts
    lines = [line for line in chart.series if not line.bars]
    points = [line for line in chart.series if line.bars]
    pairs = zip(points, lines, strict=True)
    theory = {point.label: dict(zip(line.x, line.y, strict=True)) for point, line in pairs}
    assert len(theory) == 6
    for entry in map(entry_of, results.records):
        line = theory[f"{entry.label}, {entry.size} features"]
        # Logarithms between two points of the line, three degrees apart.
        steps = np.interp(entry.angle, [*line], np.log([*line.values()]))
        assert math.log(entry.expected) == pytest.approx(steps, abs=4e-3), entry.label


def test_an_error_far_from_theory_is_marked_and_not_counted_as_agreement():
    records = ea.mse(["performer-trig"], **{**ONE_ENTRY, "draws": 8, "angles": (60, 120)}).records
    (table,) = ea.Results(records).tables()
    assert table.columns[1:] == ("60°", "120°") and "≠" not in str(table)
    assert ea.Results(records).sentences()[0].startswith("2 of 2 kernel errors lie on the closed forms")
    wrong = replace(records[0], expected_kernel_mse=9 * records[0].kernel_mse)
    (table,) = ea.Results([wrong, records[1]]).tables()
    assert "≠" in table.rows[0][1] and "≠" not in table.rows[0][2]
    assert "≠: more than 4 standard errors from theory." in table.notes
    assert ea.Results([wrong, records[1]]).sentences()[0].startswith("1 of 2 kernel errors")


def test_at_a_single_angle_errors_are_shown_over_the_number_of_features():
    results = ea.mse(["performer-trig"], **{**ONE_ENTRY, "sizes": (4, 8, 16)})
    (chart,) = results.plots()["kernel_mse"].charts
    assert chart.x.label == "number of features" and chart.series[0].x == [4, 8, 16]
    assert results.tables()[0].columns == ("backend", "4", "8", "16")


def test_points_that_the_budget_skipped_are_a_sentence_in_place_of_empty_tables():
    first, second = ea.mse(["performer-trig"], **{**ONE_ENTRY, "angles": (60, 90)}).records
    skipped = Record(case=second.case, status="skipped", reason=OVER_BUDGET)
    results = ea.Results([first, skipped], environment={"study": "mse"})
    assert len(results.tables()) == 1
    assert "1 point skipped (budget)" in results.sentences()[-1]
    assert results.sentences()[-1].endswith("Skipped: pair, norm 0.5, angle 90 (1 of 1).")


def test_a_record_without_an_entry_or_a_size_is_left_out_of_lines():
    (record,) = ea.mse(["performer-trig"], **ONE_ENTRY).records
    sizeless = replace(record, case=replace(record.case, label="performer-trig"))
    for strange in (sizeless, replace(record, kernel_value=0.0)):
        assert ea.Results([strange], environment={"study": "mse"}).tables() == []
