"""Runs of several machines: rows and lines name the machine, and nothing joins two."""

import pytest
from made_records import case, costs, errors, folder

import efficient_attn as ea
from efficient_attn.report import machines
from efficient_attn.report.figures import Axis, Chart, Plot, Series
from efficient_attn.runner.record import Record, replace
from efficient_attn.studies.report import report

HERE = {"processor": "Babbage 2", "cores_usable": 2, "torch": {"version": "2.13.0"}, "study": "bench"}
THERE = {**HERE, "processor": "Zuse 3"}


def slower(records, factor):
    return [replace(one, times_s=one.times_s and tuple(factor * t for t in one.times_s)) for one in records]


@pytest.fixture
def both(tmp_path):
    """The short lengths on one machine, the long ones, three times as slow, on the other."""
    own = folder(tmp_path / "here", costs(lengths=(256, 512)), HERE)
    return own, folder(tmp_path / "there", slower(costs(lengths=(512, 1024)), 3), THERE)


def lines(plot):
    return {one.label: tuple(one.x) for chart in plot.charts for one in chart.series}


def test_no_line_of_a_plot_joins_two_machines(both):
    plots = ea.read(*both).plots()
    assert set(plots) == {"time", "memory"}
    for plot in plots.values():
        assert lines(plot) == {
            f"{label} · {machine}": tokens
            for machine, tokens in (("Babbage 2", (256, 512)), ("Zuse 3", (512, 1024)))
            for label in ("exact", "window")
        }
        strokes = {one.label: one.style["linestyle"] for one in plot.charts[0].series}
        assert strokes["exact · Babbage 2"] != strokes["exact · Zuse 3"]
        assert list(plot.charts[0].x.ticks) == [256, 512, 1024]


def test_axes_hold_the_times_of_all_machines(both):
    low, high = ea.read(*both).plots()["time"].charts[0].y.limits
    times = [one for chart in ea.read(*both).plots()["time"].charts for s in chart.series for one in s.y]
    assert low < min(times) and max(times) < high


def test_tables_have_a_row_per_machine_with_environment_noise_and_error(tmp_path):
    made = [*costs(lengths=(64,)), errors(labels=())[0]]
    loaded = {**THERE, "during": [{"others_share": 0.4}]}
    runs = [folder(tmp_path / "a", made, HERE), folder(tmp_path / "b", slower(made, 3), loaded)]
    (table,) = ea.read(*runs).across_machines()
    assert table.title == "Attention on cpu at 64 tokens: 2 heads of 8, float32"
    assert table.columns[:6] == ("backend", "machine", "environment", "time, ms", "noise", "peak memory, MiB")
    rows = {row[:2]: row for row in table.rows}
    assert rows["window", "Babbage 2"][2] == "torch 2.13.0, 2 threads"
    assert float(rows["window", "Zuse 3"][3]) == pytest.approx(
        3 * float(rows["window", "Babbage 2"][3]), rel=0.01
    )
    assert rows["window", "Babbage 2"][4].startswith("±") and "%" not in rows["window", "Babbage 2"][4][4:]
    assert "other processes took 40% of all cores" in rows["window", "Zuse 3"][4]
    assert rows["mean of V", "Zuse 3"][3:] == ("", "", "", "0.2")


def test_times_and_errors_of_one_machine_stand_in_one_row_with_its_environment(tmp_path):
    runs = []
    for environment in (HERE, THERE):
        name, loaded = environment["processor"], {**environment, "during": [{"stolen_share": 0.3}]}
        error = [replace(one, case=replace(one.case, options={})) for one in errors(labels=("window",))[1:2]]
        runs.append(folder(tmp_path / name / "bench", costs(lengths=(64,)), loaded))
        runs.append(folder(tmp_path / name / "mse", error, {**environment, "study": "mse"}))
    (table,) = ea.read(*runs).across_machines()
    row = next(row for row in table.rows if row[:2] == ("window", "Zuse 3"))
    assert row[2] == "torch 2.13.0, 2 threads" and row[-1] == "0.062"
    assert "the host gave 30% of all cores" in row[4]


def test_sizes_of_one_backend_are_rows_and_inputs_are_a_range(tmp_path):
    made = errors(inputs=("gaussian(norm=1.0)", "gaussian(norm=0.5)"))
    made[-1] = replace(made[-1], output_relative_error=0.5)
    (table,) = ea.read(*(folder(tmp_path / e["processor"], made, e) for e in (HERE, THERE))).across_machines()
    assert table.columns[-1] == "error" and len(table.rows) == 6
    found = [(label, error) for label, machine, *_, error in table.rows if machine == "Zuse 3"]
    assert found[1:] == [
        ("performer-positive, num_features=16", "0.062"),
        ("performer-positive, num_features=64", "0.016 to 0.5"),
    ]


def test_there_is_a_table_for_every_device_and_length(both):
    titles = [table.title for table in ea.read(*both).across_machines()]
    assert [title.partition(":")[0] for title in titles] == [
        f"Attention on cpu at {tokens} tokens" for tokens in (256, 512, 1024)
    ]


def test_equal_cases_of_two_machines_are_both_kept(tmp_path):
    runs = [folder(tmp_path / "a", costs(), HERE), folder(tmp_path / "b", slower(costs(), 3), THERE)]
    frame = ea.read(*runs).to_pandas()
    assert list(frame.machine.unique()) == ["Babbage 2", "Zuse 3"] and len(frame) == 2 * len(costs())
    assert all(text.startswith(("Babbage 2: ", "Zuse 3: ")) for text in ea.read(*runs).sentences())
    own = [table.title for table in ea.read(*runs).tables() if "Time per call" in table.title]
    assert {title.rpartition(": ")[2] for title in own} == {"Babbage 2", "Zuse 3"}


def test_runs_of_one_machine_stay_one(tmp_path):
    runs = [
        folder(tmp_path / name, costs(lengths=lengths), HERE)
        for name, lengths in (("a", (64,)), ("b", (128,)))
    ]
    found = ea.read(*runs)
    assert found.by_machine == {} and found.across_machines() == []
    assert lines(found.plots()["time"]) == {"exact": (64, 128), "window": (64, 128)}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"processor": "Zuse 3"}, ["Babbage 2", "Zuse 3"]),
        ({"cores_usable": 8}, ["Babbage 2, 2 cores", "Babbage 2, 8 cores"]),
        ({"torch": {"version": "2.8.0"}}, ["Babbage 2, torch 2.13.0", "Babbage 2, torch 2.8.0"]),
        ({"gpu": {"name": "H100"}}, ["Babbage 2", "H100"]),
        ({"utc": "2026-01-02"}, ["Babbage 2", "Babbage 2"]),
    ],
)
def test_a_machine_is_named_by_the_entries_that_differ(change, named):
    assert machines.names([HERE, {**HERE, **change}]) == named


def test_a_run_without_environment_is_no_known_machine():
    assert machines.names([HERE, {}]) == ["Babbage 2", machines.UNKNOWN]


def test_records_of_two_machines_are_not_saved_as_one_run(both, tmp_path):
    with pytest.raises(ea.DataError, match="Records of 2 machines are no single run"):
        ea.read(*both).save(tmp_path / "joined")


def test_a_report_of_two_machines_begins_with_both(both, tmp_path):
    for run in both:
        kept = [line for line in (run / "records.jsonl").read_text().splitlines() if '"time"' in line]
        (run / "records.jsonl").write_text("\n".join(kept) + "\n")
    (page,) = report(*both, html=tmp_path / "page.html")
    text = page.read_text(encoding="utf-8")
    assert "2 machines: Babbage 2; Zuse 3." in text
    assert text.index("Attention on cpu at 512 tokens") < text.index("Time per call, ms")


def plot(title="", ticks=(), draw=None):
    chart = Chart(Axis("x", ticks=ticks), Axis("y"), (Series("exact", (1,), (2,), {}),), title, draw=draw)
    return {"time": Plot("Time", "", ((chart,),))}


@pytest.mark.parametrize("other", [plot(title="block"), plot(ticks={1: "a"}), plot(draw=lambda axes: None)])
def test_plots_that_cannot_share_axes_stay_apart(other):
    found = machines.plots({"A": plot(), "B 2": other})
    assert [(name, one.title) for name, one in found.items()] == [
        ("time-A", "Time: A"),
        ("time-B-2", "Time: B 2"),
    ]


def test_failures_and_times_of_zero_are_rows_too(tmp_path):
    failed = Record(case=case("time", "window", 64), status="oom", reason="too large")
    zero = Record(case=case("time", "exact", 64), times_s=(0.0,) * 8, round_sizes=(2,) * 4)
    runs = [folder(tmp_path / "a", [failed, zero], HERE), folder(tmp_path / "b", [failed], THERE)]
    (table,) = ea.read(*runs).across_machines()
    assert [row[3] for row in table.rows if row[0] == "window"] == ["oom", "oom"]
    assert [row[4] for row in table.rows if row[0] == "exact"] == ["no interval"]
