"""Comparisons: one table by time, the front, and a sentence that goes no further than its measurements."""

import pytest
from study_points import points_of, study
from synthetic_records import case, timed

from efficient_attn.errors import DataError
from efficient_attn.measure.variants import OWN
from efficient_attn.runs.results import Results, read
from efficient_attn.runs.study import Run, Settled
from efficient_attn.studies.bench.comparison import comparisons
from efficient_attn.studies.bench.tables import tables
from efficient_attn.studies.bench.view import sentences
from efficient_attn.studies.swap.record import SwapRecord as Record
from efficient_attn.studies.swap.view import sentences as swap_sentences

pytestmark = pytest.mark.usefixtures("hasty")

PLACE = {"inputs": "encoder(layer=1)", "num_heads": 12, "head_dim": 32}
# Nine calls within 1 % of each other: intervals that lie apart wherever times differ by more.
SPREAD = [1 + step / 1000 for step in range(-4, 5)]


def measured(label, error, seconds=None, peak=None, **changes):
    """The records of one contender; what is None was not measured."""
    given = PLACE | changes
    made = []
    if error is not None:
        draws = {"output_relative_error": error, "output_relative_error_draws": (error,)}
        made.append(Record(case=case("error", label, 512, of="output", **given), **draws))
    if seconds is not None:
        made.append(timed(label, 512, [seconds * one for one in SPREAD], **given))
    if peak is not None:
        made.append(Record(case=case("memory", label, 512, **given), peak_bytes=peak))
    return made


EXACT = measured("exact", 3e-7, 0.010, 4096)
MEAN = measured("uniform attention", 0.8, 0.001, 1024)
WINDOW = measured("window", 0.3, 0.004, 2048)
DENSE = measured("exact-dense", 2e-7, 0.030, 1 << 20)
ALL = [*EXACT, *MEAN, *WINDOW, *DENSE, *measured("untimed", 0.2)]
TWO_NEAR = [*ALL, *measured("slow", 0.05, 0.008), *measured("quick", 0.09, 0.005)]
INTERRUPTED = [*EXACT, *WINDOW, *DENSE, *measured("linformer", 0.05)]
LABELS = ("exact", "window", "exact-dense", "linformer", "performer-trig")
LISTED = Run(Settled(candidates=LABELS))
UNDECIDED, LOADED = [*EXACT, *measured("near", 0.05, 0.01001)], Run(Settled(), load=0.83)
STITCHED = measured("exact", 3e-7, 0.01, inputs="stitched(layer=1)")


def layered(label, errors, seconds=None):
    """Errors on layers 0, 1 and 5, and one time for all of them."""
    made = []
    for layer, error in zip((0, 1, 5), errors, strict=True):
        made += measured(label, error, inputs=f"encoder(layer={layer})")
    return made + measured(label, None, seconds, inputs="encoder(layers=0,1,5)")


LAYERED = [
    *layered("exact", (3e-7, 4e-7, 2e-7), 0.01),
    *layered("window", (0.05, 0.3, 0.09), 0.004),
    *layered("exact-dense", (2e-7,) * 3, 0.03),
]


UNDISTURBED = Run(Settled())


def sentence(records, run=UNDISTURBED, max_error=0.1):
    (text,) = sentences(records, max_error, run)
    return text


@pytest.mark.parametrize(
    ("records", "given", "told"),
    [
        (TWO_NEAR, {}, "quick is 2.0 ± 0.2 times faster than exact at 512 tokens"),
        (ALL, {"max_error": 0.3}, "window is 2.5 ± 0.2 times faster than exact"),
        (ALL, {"max_error": 0.299}, "No backend is within 29.9 % of exact and faster"),
        ([*EXACT, *WINDOW], {}, "faster ones: window (error 0.3, 2.5 ± 0.2 times faster)."),
        # Yardsticks are never the answer.
        ([*EXACT, *measured("uniform attention", 0.01, 0.001)], {}, "No backend is within 10 % of exact and"),
        ([*MEAN, *WINDOW], {}, "no error of exact attention was measured"),
        # An undecided comparison names the load and the remedy.
        (
            UNDECIDED,
            {"run": LOADED},
            "whether near is faster than exact. Background load 83 %. Rerun on an idle machine",
        ),
        # A candidate without a time is not measured.
        (INTERRUPTED, {"run": LISTED}, ". Not measured (2 of 5 candidates): linformer, performer-trig."),
        (LAYERED, {}, "of the faster ones: window (error 0.09 (0.05 to 0.3), 2.5 ± 0.2 times faster)"),
        (LAYERED, {"max_error": 0.3}, "window is 2.5 ± 0.2 times faster"),
        (STITCHED, {}, "and faster at 512 tokens (concatenated documents, layer 1;"),
    ],
)
def test_the_sentence_goes_no_further_than_the_measurements(records, given, told):
    assert told in sentence(records, **given)


def test_error_and_cost_of_different_lengths_are_never_joined():
    longer = Record(case=case("time", "window", 1024, **PLACE), times_s=(0.1,))
    found = comparisons([*EXACT, *WINDOW[:1], longer])
    (window,) = (one for one in found[0].contenders if one.label == "window")
    assert len(found) == 1 and window.timed is None


def test_the_front_is_what_nothing_beats_in_both():
    heavy = measured("heavy", 0.2, 0.006, 1 << 22)
    beaten = measured("beaten", 0.31, 0.0041, 2049)
    (one,) = comparisons([*ALL, *heavy, *beaten, *measured("equal", 0.3, 0.004)])
    # exact-dense has a smaller error than exact, but both are rounding, and it costs more.
    by_time = [row.label for row in one.front("time_s")]
    assert by_time == ["uniform attention", "window", "equal", "heavy", "exact"]
    assert [row.label for row in one.front("peak_bytes")] == ["uniform attention", "window", "exact"]


def test_what_was_asked_about_is_kept_with_the_run_and_nonsense_is_refused(tmp_path, undrawn):
    Results(ALL, environment={"study": "bench", "options": {"max_error": 0.3}}).save(tmp_path)
    assert "window is 2.5 ± 0.2 times faster" in read(tmp_path).sentences()[0]
    for nonsense in ("much", -1, True, 1e999):
        damaged = Results(ALL, environment={"study": "bench", "options": {"max_error": nonsense}})
        with pytest.raises(DataError, match=r"the run in environment\.json is damaged: max_error"):
            damaged.sentences()


def test_a_backend_that_fails_on_one_layer_has_no_error_over_all():
    broken = [record for record in LAYERED if record.case.inputs != "encoder(layer=5)"]
    (one,) = comparisons([*broken, *(r for r in LAYERED if r.case.label == "exact")])
    assert {row.label for row in one.contenders if row.error is None} == {"window", "exact-dense"}


def test_runs_on_one_layer_and_on_several_are_told_apart():
    both = comparisons([*LAYERED, *EXACT, *WINDOW])
    assert [one.case.inputs for one in both] == ["encoder(layers=0,1,5)", "encoder(layer=1)"]
    assert [row.layers for one in both for row in one.contenders if row.label == "window"] == [3, 1]


def test_lengths_beyond_the_inputs_have_no_error_and_that_is_said():
    plan = study("bench", ["window"], seq_lens=(512, 513), isolate="none")
    errors = {point.case.tokens for point in points_of(plan) if point.case.kind == "error"}
    assert errors == {512}
    drawn = PLACE | {"inputs": "gaussian"}
    records = [
        *measured("exact", 3e-7),
        Record(case=case("error", "exact", 256, of="output", **PLACE), output_relative_error=3e-7),
        *(Record(case=case("time", "exact", n, **drawn), times_s=(0.1,)) for n in (256, 512, 1024)),
    ]
    notes = [note for table in tables(records) for note in table.notes]
    assert "encoder has 512 tokens. Pass longer q, k and v with --inputs FILE." in notes


def swapped(label, distance, seconds=0.01):
    """Records of a model with another attention in all layers."""
    shared = {"of": "model", "inputs": "model on 3 texts #0"}
    kept = {} if label == OWN else {"mean_pool_distance": distance, "mean_pool_distance_draws": (distance,)}
    times_s = [seconds * one for one in (SPREAD if label == OWN else SPREAD[::-1])]
    return [Record(case=case("swap", label, 64, **shared), **kept), timed(label, 64, times_s, **shared)]


def swap_sentence(seconds, candidates):
    records = [*swapped(OWN, None), *swapped("window", 0.2, seconds)]
    (text,) = swap_sentences([*map(Record.of, records)], Settled(candidates=tuple(candidates)))
    return text


def test_the_sentence_of_a_swap_goes_no_further_than_the_measurements():
    text = swap_sentence(0.004, ["window", "linformer", "performer-positive"])
    assert "is changed least by window among the candidates measured so far" in text
    assert "Not measured (2 of 3 candidates): linformer, performer-positive." in text
    text = swap_sentence(0.01001, ["window"])
    assert "undecided, 1.00× the speed (0.92 to 1.09)" in text and "so far" not in text


def test_the_first_error_predicts_that_of_exact_attention():
    """Uniform attention is linear, but its error is one against exact attention, as all are."""
    points = points_of(study("bench", ["exact", "linformer"], seq_lens=(512,)))
    errors = {point.case.backend: point.cost for point in points if point.case.kind == "error"}
    assert len(errors) == 3 and len({*errors.values()}) == 1
