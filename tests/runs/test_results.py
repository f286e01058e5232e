"""Results: a frame, a plot, sentences, files; harmless whatever the names are."""

import pytest
from matplotlib.figure import Figure
from synthetic_records import case, costs, errors, folder

from efficient_attn.errors import DataError, OptionError, UnknownNameError
from efficient_attn.measure.record import Record, append, replace
from efficient_attn.runs.default_view import tables
from efficient_attn.runs.results import Results, read
from efficient_attn.runs.store import open_folder
from efficient_attn.runs.study import Run, Settled
from efficient_attn.tools.diff import diff


def test_a_frame_has_one_row_per_case_or_sample_with_flat_columns_and_units():
    exact, window = costs(("exact",)), costs(("window",))
    records = [*exact, *(replace(r, case=replace(r.case, options={"window": 33})) for r in window)]
    frame = Results(records).to_pandas()
    assert len(frame) == 16 and frame["tokens"].tolist()[:2] == [256, 256]
    assert {"time_s", "time_low_s", "time_high_s", "samples", "peak_bytes", "option_window"} <= set(frame)
    assert not any(
        frame[name].map(lambda value: isinstance(value, (list, tuple, dict))).any() for name in frame
    )
    # Rounds of 3, 2, 2 and 2 rising samples have medians of 1, 3.5, 5.5 and 7.5 thousandths more.
    assert frame["time_s"][0] == pytest.approx(1e-6 * 256 * 256 * 1.0045)
    raw = Results(records).to_pandas(raw=True)
    assert len(raw) == 8 * 9 + 8
    assert raw["sample"].max() == 8 and raw["times_s"].notna().sum() == 8 * 9


def test_a_number_over_draws_is_that_of_the_tables():
    first, second = (1.0, 2.0, 9.0, 3.0, 4.0, 5.0), (1.0, 2.0, 6.0)
    output = Record(
        case=case("error", "performer-trig", 64, of="output"), output_mse=4.0, output_mse_draws=first
    )
    kernel, model = (
        Record(case=case("error", "performer-trig", 64, of=of), kernel_mse=3.0, kernel_mse_draws=second)
        for of in ("kernel", "model")
    )
    row = Results([output]).summary()[0]
    # Six draws have a range of 95 %, and an even number of them a median between the two in the middle.
    assert [row[f"output_mse{end}"] for end in ("", "_low", "_high", "_mean")] == [3.5, 1.0, 9.0, 4.0]
    for row in Results([kernel, model]).summary():
        assert row["kernel_mse_mean"] == 3.0 and "kernel_mse" not in row
    # A study without a table of its own shows the same number.
    (table,) = tables([output], Run(Settled()))
    assert table.rows[0][2] == "3.5"


def test_columns_of_cases_that_are_alike_in_all_rows_are_left_out_unless_asked_for():
    results = Results(costs())
    frame, whole = results.to_pandas(), results.to_pandas(constant=True)
    assert {"kind", "label", "tokens", "backend", "time_s"} <= set(frame)
    assert not {"dtype", "threads", "num_heads", "seed"} & set(frame)
    assert set(whole) - set(frame) >= {"dtype", "threads", "num_heads", "seed"} and len(whole) == len(frame)
    assert set(Results(costs()[:1]).to_pandas()) >= {"dtype", "threads"}


def test_attention_and_block_have_panels_of_their_own_in_which_a_backend_looks_alike():
    blocks = [replace(one, case=replace(one.case, of="block")) for one in costs()]
    results = Results([*costs(), *blocks])
    first, second = results.plot().figure.axes
    titles = [" ".join(ax.get_title(loc="left").split()) for ax in (first, second)]
    assert titles == [f"{block}2 heads of 8, float32, 2 CPU threads" for block in ("", "Block: ")]
    for ax in (first, second):
        assert [line.get_label() for line in ax.lines] == ["exact", "window"]
        assert {text.get_text() for text in ax.texts} == {"exact", "window"}
        assert ax.get_xscale() == ax.get_yscale() == "log"
    assert [line.get_color() for line in first.lines] == [line.get_color() for line in second.lines]
    ax = Figure().subplots()
    with pytest.raises(OptionError, match="this plot has 2"):
        results.plot(ax=ax)
    assert Results(costs()).plot(ax=ax) is ax
    assert len(ax.lines) == 2 and ax.get_xlabel() == "sequence length, tokens"


def test_one_wide_interval_does_not_flatten_the_lines():
    wide, *others = costs()
    median = 1e-6 * 256 * 256
    rounds = [median * factor for factor in (1e-4, 1.0, 1.0, 1.0, 1e4) for _ in range(2)]
    results = Results([replace(wide, times_s=tuple(rounds), round_sizes=(2,) * 5), *others])
    frame = results.to_pandas()
    assert frame["time_high_s"][0] > 100 * frame["time_s"].max(), "the interval is wide"
    low, high = results.plot("time").get_ylim()
    assert low > frame["time_s"].min() / 4 and high < 4 * frame["time_s"].max()


def test_what_is_saved_is_read_again_and_a_torn_record_is_told(tmp_path, undrawn):
    file, environment = Results(costs(), environment={"python": "3"}).save(tmp_path)
    assert (file.name, environment.name) == ("records.jsonl", "environment.json")
    again = read(tmp_path)
    assert list(again) == list(again.records) == costs() and again.environment == {"python": "3"}
    assert list(read(file, tmp_path)) == costs() * 2
    file.write_bytes(file.read_bytes() + b'{"schema": 1')
    assert read(file).notes == ("The last line of records.jsonl was cut off and is left out.",)


HERE = {"processor": "Babbage 2", "torch": {"version": "2.13.0"}, "study": "bench"}
THERE = {**HERE, "processor": "Zuse 3"}


def test_several_runs_are_drawn_as_one_and_rows_name_their_run(tmp_path, undrawn):
    during = [{"others_share": 0.4}]
    runs = [
        folder(tmp_path / name, costs(lengths=lengths), {**HERE, "during": during, "utc": name})
        for name, lengths in (("a", (256, 512)), ("b", (1024, 2048)))
    ]
    results = read(*runs)
    assert results.to_pandas()["run"].value_counts().to_dict() == {str(run): 8 for run in runs}
    assert "run" not in read(runs[0]).to_pandas()
    assert results.environment == {**HERE, "during": during * 2}
    assert [line.x for line in results.plots()["time"].charts[0].series] == [(256, 512, 1024, 2048)] * 2
    assert len(read(results.save(tmp_path / "whole")[0]).records) == 16


@pytest.mark.parametrize(
    ("lengths", "environment", "factor", "message"),
    [
        ((512, 1024), HERE, 3, "a and .*b both measured exact, 512 tokens, time"),
        ((1024, 2048), THERE, 1, "times are of several machines .*Babbage 2.*; .*Zuse 3"),
        ((1024, 2048), {**HERE, "torch": {"version": "2.8.0"}}, 1, "times are of several machines"),
    ],
)
def test_nothing_draws_unlike_records_of_one_case_or_times_of_two_machines(
    lengths, environment, factor, message, tmp_path
):
    slower = [
        replace(record, times_s=record.times_s and tuple(factor * time_s for time_s in record.times_s))
        for record in costs(lengths=lengths)
    ]
    first = folder(tmp_path / "a", costs(lengths=(256, 512)), HERE)
    results = read(first, folder(tmp_path / "b", slower, environment))
    assert len(results) == len(results.to_pandas()) == 16 and results._repr_html_() is None
    for draw in (results.tables, results.sentences, results.plots, lambda: results.save(tmp_path / "c")):
        with pytest.raises(DataError, match=message):
            draw()
    assert not (tmp_path / "c").exists()
    with pytest.raises(DataError, match=message):
        diff(first, results)


def test_errors_of_two_machines_are_drawn_as_one_run(tmp_path):
    runs = [
        folder(tmp_path / backend, errors(labels=(backend,)), {**environment, "study": "mse"})
        for backend, environment in (("performer-trig", HERE), ("performer-positive", THERE))
    ]
    (table, *_) = read(*runs).tables()
    assert {"performer-trig", "performer-positive", "uniform attention"} <= {row[0] for row in table.rows}


def test_what_cannot_be_read_drawn_or_written_is_named(tmp_path):
    with pytest.raises(UnknownNameError, match="No plot is called 'speed'"):
        Results(costs()).plot("speed")
    with pytest.raises(DataError, match="name at least one folder"):
        read()
    with pytest.raises(DataError, match="Cannot read records from"):
        read(tmp_path)
    append(tmp_path / "records.jsonl", costs()[0])
    with pytest.raises(DataError, match="holds records of another run already"):
        open_folder(tmp_path, fresh=True)
