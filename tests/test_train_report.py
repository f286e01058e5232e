"""What is said of models in training: intervals, differences on the same windows, equal seconds, the plot."""

from dataclasses import replace

import numpy as np
import pytest

import efficient_attn as ea
from efficient_attn.runner.records import Case, Record
from efficient_attn.stats.noise_warnings import DURING
from efficient_attn.studies.train.analysis import training_runs
from efficient_attn.studies.train.view import sentences as training_sentences
from efficient_attn.studies.train.view import tables as training_tables
from efficient_attn.studies.view import flat_row

CASE = Case(kind="train", backend="exact", label="exact", of="encoder", layers=2, num_heads=2, head_dim=8,
            tokens=16, batch=4, causal=True, backward=True, dtype="float32", device="cpu", threads=1,
            inputs="text.txt")  # fmt: skip
HARDNESS = np.linspace(2.0, 4.0, 9)


def record(backend, *, worse=0.0, noise=0.0, second=1.0, steps=(10, 20, 30), **changed):
    """A curve that falls by a bit from evaluation to evaluation, so much worse than that of `exact`."""
    scatter = noise * np.resize([1.0, -1.0, 0.0], 9)
    windows = HARDNESS + worse + scatter
    last = float(windows.mean())
    return Record(
        case=replace(CASE, backend=backend, label=backend),
        train_steps=steps,
        train_seconds_s=tuple(second * step / 10 for step in steps),
        train_bits_per_byte=tuple(last + len(steps) - number for number in range(len(steps))),
        held_out_bits_per_byte=tuple(last + len(steps) - 1 - number for number in range(len(steps))),
        held_out_bits_per_byte_windows=tuple(windows),
        **changed,
    )


RECORDS = [
    record("exact"),
    record("window", worse=-0.1, noise=0.01, second=2.0),
    record("linear-elu", worse=0.5, noise=0.01, second=0.5),
    record("linear-relu", worse=0.01, noise=0.3),
]


def by_label(records=RECORDS):
    (run,) = training_runs(records)
    return run, {one.label: one for one in run.curves}


def test_intervals_are_those_of_a_mean_over_windows():
    _, found = by_label()
    half = 1.96 * HARDNESS.std(ddof=1) / 3
    assert found["exact"].final == pytest.approx((HARDNESS.mean(), half))
    assert found["exact"].beyond_exact is None


def test_differences_are_taken_on_the_same_windows():
    _, found = by_label()
    scatter = 1.96 * 0.01 * np.std(np.resize([1.0, -1.0, 0.0], 9), ddof=1) / 3
    # The windows differ far more from each other than the two models do on any of them.
    assert found["window"].beyond_exact == pytest.approx((-0.1, scatter))
    assert found["window"].beyond_exact.is_clear and not found["linear-relu"].beyond_exact.is_clear


def test_curves_are_compared_after_as_many_seconds_as_the_fastest_took():
    run, found = by_label()
    assert run.common_s == 1.5 == found["linear-elu"].seconds_s[-1]
    # Halfway between the first and the second evaluation; before the first one there is nothing.
    assert found["exact"].at_common_time == pytest.approx(found["exact"].held_out[0] - 0.5)
    assert found["window"].at_common_time is None
    assert found["exact"].steps_per_s == pytest.approx(10.0)


def test_what_rounding_makes_of_training_is_no_difference():
    _, found = by_label([record("exact"), record("exact-dense", worse=1e-5), record("window", worse=1e-2)])
    assert not found["exact-dense"].beyond_exact.is_clear and found["window"].beyond_exact.is_clear


def test_after_other_numbers_of_steps_nothing_is_subtracted():
    _, found = by_label([record("exact"), record("window", steps=(10, 20))])
    assert found["window"].beyond_exact is None and found["window"].final is not None


def test_runs_of_other_texts_seeds_and_sizes_stand_apart():
    others = [replace(RECORDS[0], case=replace(CASE, **{name: value}))
              for name, value in (("inputs", "other.txt"), ("seed", 1), ("tokens", 32))]  # fmt: skip
    assert len(training_runs([*RECORDS, *others])) == 4


def test_sentences_say_who_is_lower_than_exact_attention_and_who_cannot_be_told_from_it():
    steps, seconds = training_sentences(RECORDS)
    assert steps == (
        "After 30 steps exact attention is at 3.00 bits per byte of held-out text; "
        "lower: window (−0.100 ±0.006); not significantly different: linear-relu (+0.010 ±0.170); "
        "higher: linear-elu (+0.500 ±0.006)."
    )
    assert seconds.startswith(
        "After 1.5 s of training each, which the fastest took for all its steps, the lowest"
    )
    (alone,) = training_sentences(RECORDS[:1])
    assert alone == "After 30 steps exact attention is at 3.00 bits per byte of held-out text."
    best, *_ = training_sentences([RECORDS[0], RECORDS[2]])
    assert "; higher: linear-elu" in best and "lower:" not in best


def copier(backend, accuracy, *, ended=20, **changed):
    """A model of the task copy, right in this share of tokens."""
    steps = tuple(range(10, ended + 1, 10))
    made = record(backend, steps=steps)
    return Record(
        case=replace(made.case, of="encoder-decoder"),
        train_steps=steps,
        train_seconds_s=made.train_seconds_s,
        held_out_bits_per_token=made.held_out_bits_per_byte,
        held_out_bits_per_token_windows=made.held_out_bits_per_byte_windows,
        accuracy=accuracy,
        sequence_accuracy=accuracy,
        **changed,
    )


@pytest.mark.parametrize(
    ("others", "groups"),
    [
        ([copier("linformer", 0.2851)], "less than 99.9% of tokens: linformer (28.51%)"),
        # Nothing but all is 100 %, and no share is shown on the other side of the limit.
        ([copier("window", 0.99999)], "at least 99.9% of tokens: window (99.99%)"),
        ([copier("window", 0.99899)], "less than 99.9% of tokens: window (99.89%)"),
        ([copier("window", 1.0)], "at least 99.9% of tokens: window (100.00%)"),
        (
            [
                copier("window", 0.9, ended=10),
                copier("linformer", 1.0, status="error", reason="it broke"),
                copier("linear-elu", None, ended=0, status="error", reason="it broke"),
            ],
            "not compared: window (at step 10), linformer (ended at step 20), linear-elu (ended before an "
            "evaluation)",
        ),
    ],
)
def test_a_sentence_compares_copies_after_the_steps_of_exact_attention(others, groups):
    (sentence,) = training_sentences([copier("exact", 0.2150), *others])
    assert sentence == (
        "After 20 steps exact attention copies 21.50% of the tokens of unseen sequences, 21.50% of sequences "
        f"without a mistake; {groups}."
    )


def test_a_loaded_machine_leaves_the_order_at_equal_time_open():
    steps, seconds = training_sentences(RECORDS, {DURING: [{"others_share": 0.83}]})
    assert "lower: window" in steps and "could not tell on this machine now" in seconds
    assert "83%" in seconds and "window" not in seconds


def test_the_table_has_every_model_the_lowest_first_and_says_what_failed():
    failed = record("own", status="error", reason="it broke")
    empty = Record(case=replace(CASE, backend="none", label="none"), status="error", reason="at once")
    (table,) = training_tables([*RECORDS, failed, empty])
    assert [row[0] for row in table.rows] == ["window", "exact", "own", "linear-relu", "linear-elu", "none"]
    # The half of the interval is 1.96 · 0.6829 / 3.
    assert table.rows[0] == ("window", "30", "2.900 ±0.446", "−0.100 ±0.006", "–", "5.00")
    assert table.rows[-1] == ("none", "–", "–", "", "–", "–")
    assert {"own: error: it broke", "none: error: at once"} <= set(table.notes)


def test_rows_are_flat_and_have_units():
    exact, *_ = [row for row in map(flat_row, RECORDS) if row["label"] == "exact"]
    assert exact["held_out_bits_per_byte"] == 3.0 and exact["train_steps"] == 30


def test_the_plot_has_a_line_in_either_panel_and_its_limits_hold_all_ends():
    ax = ea.Results(RECORDS).plot()
    left, right = ax.figure.axes[:2]
    assert {line.get_label() for line in left.lines} == {one.case.label for one in RECORDS}
    assert [list(line.get_xdata()) for line in left.lines if line.get_label() == "window"] == [[10, 20, 30]]
    assert [list(line.get_xdata()) for line in right.lines if line.get_label() == "window"] == [[2, 4, 6]]
    low, high = left.get_ylim()
    assert all(low < one.held_out_bits_per_byte[-1] < high for one in RECORDS)
    named = [text.get_text() for text in ax.figure.legends[0].get_texts()]
    assert named == ["window", "exact", "linear-relu", "linear-elu"]


def test_a_folder_of_training_is_read_drawn_and_put_on_a_page(tmp_path):
    results = ea.Results([*RECORDS, replace(RECORDS[0], case=replace(CASE, label="<b>$x$\x1b", backend="b"))])
    results.save(tmp_path)
    assert not results.notes
    assert {"training.png", "training.svg", "report.html", "tables.md", "summary.csv"} <= {
        path.name for path in tmp_path.iterdir()
    }
    again = ea.read(tmp_path)
    assert again.records == results.records and list(again.plots()) == ["training"]
    page = (tmp_path / "report.html").read_text()
    assert "Models were trained in turn" in page and "<b>$" not in page
    assert again.plot().figure.get_suptitle().startswith("Held-out bits per byte")
    assert len(again.to_pandas()) == 5 and not ea.diff(tmp_path, tmp_path).regressions


@pytest.mark.parametrize(
    "lost", ["train_seconds_s", "held_out_bits_per_byte", "held_out_bits_per_byte_windows"]
)
@pytest.mark.parametrize("value", [None, (None, 1.0, 2.0), (1.0,), ()])
def test_records_with_numbers_missing_are_shown_as_far_as_they_go(lost, value):
    results = ea.Results([RECORDS[0], replace(RECORDS[1], **{lost: value})])
    assert results.tables() and results.sentences() and results.summary() and results.plot()
