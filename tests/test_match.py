"""Equal budgets: the size of each backend follows from what the reference takes, and the record says so."""

import pytest
from drawn import texts

import efficient_attn as ea
from efficient_attn.problem import AttentionProblem
from efficient_attn.runner.sizes import YARDSTICKS, sized
from efficient_attn.studies.mse import match
from efficient_attn.studies.mse.analysis import panels

ASKED = {"inputs": "gaussian", "seq_len": 64, "head_dim": 8, "norms": (0.5,), "sizes": (8, 16), "draws": 1}
NAMES = ["performer-positive", "performer-trig", "linformer", "window"]


def sizes_of(results):
    found = {}
    for record in results.records:
        if record.case.backend not in YARDSTICKS:
            found.setdefault(record.case.backend, []).append((record.matched_size, sized(record.case).size))
    return found


def test_equal_directions_are_twice_the_features_of_a_map_that_makes_two():
    results = ea.mse(NAMES, **ASKED, match="directions")
    assert sizes_of(results) == {
        "performer-positive": [(8, 8), (16, 16)],
        "performer-trig": [(8, 16), (16, 32)],
        "linformer": [(8, 8), (16, 16)],
        "window": [(8, 7), (16, 15)],
    }
    trig = [r for r in results.records if r.case.backend == "performer-trig"]
    assert [(r.matched, r.matched_amount, r.num_directions) for r in trig] == [
        ("directions", 8.0, 8),
        ("directions", 16.0, 16),
    ]


def test_equal_operations_are_the_most_that_fit_into_the_budget():
    results = ea.mse(NAMES, **ASKED, match="flops")
    problem = AttentionProblem(head_dim=8, num_heads=1, max_tokens=64)

    def flops(name, option, size):
        spec = ea.spec(name)
        return spec.flops(problem, spec.options_type(**{option: size}), 64)

    budgets = {size: flops("performer-positive", "num_features", size) for size in (8, 16)}
    options = {"performer-trig": ("num_features", 2), "linformer": ("rank", 1), "window": ("window", 2)}
    for name, (option, step) in options.items():
        for reference, own in sizes_of(results)[name]:
            assert flops(name, option, own) <= budgets[reference] < flops(name, option, own + step)
    records = [r for r in results.records if r.case.backend == "linformer"]
    assert [r.matched_amount for r in records] == [
        flops("linformer", "rank", r.case.options["rank"]) for r in records
    ]


@pytest.mark.parametrize("quantity", ["time", "memory"])
def test_equal_seconds_and_bytes_are_measured_beforehand_and_never_more_than_the_budget(
    quantity, monkeypatch
):
    # In the place of a clock: a backend takes as long as it has features, ranks or keys in its window.
    amount = {"performer-positive": 3.0, "linformer": 1.0}
    fake = lambda variant, subject, option, size: amount[variant.backend] * size  # noqa: E731
    monkeypatch.setitem(match._AMOUNTS, quantity, fake)
    results = ea.mse(["performer-positive", "linformer"], **ASKED, match=quantity)
    assert sizes_of(results) == {"performer-positive": [(8, 8), (16, 16)], "linformer": [(8, 16), (16, 32)]}
    assert {r.matched_amount for r in results.records if r.case.backend == "linformer"} == {16.0, 32.0}


def test_peak_bytes_of_every_backend_stay_within_the_budget():
    results = ea.mse(["performer-positive", "linformer"], **ASKED, match="memory")
    amounts = {}
    for record in results.records:
        if record.matched is not None:
            amounts.setdefault(record.matched_size, {})[record.case.backend] = record.matched_amount
    assert amounts and all(one.get("linformer", 0) <= one["performer-positive"] for one in amounts.values())


def test_what_fits_no_budget_and_what_nobody_counted_is_said(monkeypatch):
    monkeypatch.setitem(
        match._AMOUNTS, "time", lambda v, s, o, n: 1.0 if v.backend == match.REFERENCE else 2.0
    )
    (record,) = [r for r in ea.mse(["window"], **ASKED, match="time").records if r.case.backend == "window"]
    assert (record.status, record.reason) == (
        "unsupported",
        "No size of 'window' takes as little time as 'performer-positive' with 16 features.",
    )


def test_a_column_is_a_budget_and_a_cell_tells_the_size_that_fits_into_it():
    results = ea.mse(["performer-trig", "exact"], **ASKED, match="directions")
    (panel,) = panels(results.records, "output_relative_error")
    assert [point.size for point in panel.curves[0].points] == [8, 16]
    table = results.tables()[0]
    row = next(row for row in table.rows if row[0] == "performer-trig")
    assert table.columns[2:] == ("8", "16") and [cell.split()[1] for cell in row[2:]] == ["[16]", "[32]"]
    assert table.notes[0].startswith("Equal budgets of directions: a column is what performer-positive takes")
    assert "budget: the directions of performer-positive" in texts(results.plot())
