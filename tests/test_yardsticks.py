"""Metrics of errors, and their intervals over draws and inputs."""

import pytest
import torch
from drawn import texts

import efficient_attn as ea
from efficient_attn.studies.mse.analysis import panels

SMALL = {"inputs": "gaussian", "seq_lens": 24, "head_dim": 4, "norms": (0.5,), "sizes": (4, 8), "draws": 3}
RELATIVE = "output_relative_error"


@pytest.mark.parametrize(
    ("metric", "quantities"), [("relative", ["output_mse", RELATIVE]), ("mse", ["output_mse"])]
)
def test_records_tables_and_plots_hold_the_metric(metric, quantities):
    results = ea.mse(["performer-positive"], **SMALL, metric=metric)
    shown = RELATIVE if metric == "relative" else "output_mse"
    for record in results.records:
        assert [name for name in ("output_mse", RELATIVE) if getattr(record, name) is not None] == quantities
    assert len(getattr(results.records[-1], f"{shown}_draws")) == 3
    title = results.tables()[0].title.partition(":")[0]
    assert results.plot().get_ylabel().replace("\n", " ") == title.lower()


def test_the_interval_over_several_seeds_of_the_inputs_is_that_of_their_medians():
    results = ea.mse(["performer-positive"], **{**SMALL, "sizes": (64,), "draws": 8}, seeds=3)
    records = [r for r in results.records if r.case.backend == "performer-positive"]
    assert [r.case.seed for r in records] == [0, 1, 2]
    (panel,) = panels(results.records, RELATIVE)
    (point,) = panel.curves[0].points
    medians = sorted(float(torch.tensor(r.output_relative_error_draws).quantile(0.5)) for r in records)
    assert point.samples == 3
    assert (point.low, point.value, point.high) == pytest.approx(medians)
    assert "±: median of 3 seeds of the inputs and its range." in results.tables()[0].notes
    assert "bands: median of 3 seeds of the inputs and its range" in texts(results.plot().figure)


def test_a_single_draw_has_no_interval():
    notes = ea.mse(["performer-trig"], **{**SMALL, "draws": 1}, seeds=1).tables()[0].notes
    assert not any(note.startswith("±") for note in notes)


def test_the_interval_over_draws_on_one_seed_of_the_inputs_says_that_it_is_over_draws_alone():
    results = ea.mse(["performer-positive"], **{**SMALL, "draws": 6}, seeds=1)
    (note,) = (note for note in results.tables()[0].notes if note.startswith("±"))
    assert note.startswith("±: median of 6 draws and its 95 % interval, over draws alone")
    assert "over draws alone" in texts(results.plot().figure).replace("\n", " ")
