"""Comparisons: a table and a sentence of each setting, which say no more than the records."""

import re
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from study_points import points_of, study
from synthetic_records import case, timed

from efficient_attn.errors import NOT_CAUSAL, DataError
from efficient_attn.measure.variants import OWN
from efficient_attn.runs.results import Results, read
from efficient_attn.runs.store import OVER_BUDGET
from efficient_attn.runs.study import Run, Settled
from efficient_attn.stats.estimates import FASTER, curves
from efficient_attn.stats.speeds import speed_ups
from efficient_attn.studies.bench import COLUMNS, Bench
from efficient_attn.studies.bench.comparison import comparisons
from efficient_attn.studies.swap.record import SwapRecord as Record
from efficient_attn.studies.swap.view import sentences as swap_sentences

pytestmark = pytest.mark.usefixtures("hasty")

SHAPE = {"num_heads": 12, "head_dim": 32}
# Nine rounds within 1 % of each other.
SPREAD = [1 + step / 1000 for step in range(-4, 5)]
UNDISTURBED = Run(Settled())


def error(label, value, *, tokens=512, inputs="encoder(layer=1)", shape=SHAPE, **fields):
    draws = {"output_relative_error": value, "output_relative_error_draws": (value,)}
    return Record(case=case("error", label, tokens, of="output", inputs=inputs, **shape), **draws, **fields)


def time(label, seconds, tokens=512):
    return timed(label, tokens, [seconds * factor for factor in SPREAD], **SHAPE)


def failed(record, status="skipped", reason=f"too long {OVER_BUDGET}"):
    return Record(case=record.case, status=status, reason=reason)


def layered(label, errors, seconds):
    """Errors on layers 0, 1 and 5, and a time."""
    layers = zip((0, 1, 5), errors, strict=True)
    return [*(error(label, x, inputs=f"encoder(layer={n})") for n, x in layers), time(label, seconds)]


def table_of(records, column="time"):
    return Bench(column=column).view("tables", records, UNDISTURBED)[0]


EXACT, MEAN = [error("exact", 3e-7), time("exact", 0.010)], [error("uniform attention", 0.8)]
WINDOW = [error("window", 0.3), time("window", 0.004)]
BASELINES = [error("exact-dense", 2e-7), time("exact-dense", 0.001), *MEAN, error("linear-relu", 0.01)]
ALL = [*EXACT, *WINDOW, *BASELINES]
NEAR = [error("slow", 0.05), time("slow", 0.009), error("quick", 0.09), time("quick", 0.005)]
LONGER = [time(label, seconds, 1024) for label, seconds in (("exact", 0.04), ("near", 0.0401))]
LAYERED = [*layered("exact", (3e-7,) * 3, 0.01), *layered("window", (0.05, 0.3, 0.09), 0.004)]
SHORT = [error(label, 0.05, tokens=256) for label in ("exact", "near")]
SKIPPED = [*EXACT, error("near", 0.05), SHORT[0], failed(SHORT[1])]
# Neither faster nor the same.
UNEVEN = [*EXACT, error("near", 0.05), timed("near", 512, [0.006, 0.02, 0.004, 0.03], **SHAPE)]
SLOWER = [error("slow", 0.05), time("slow", 0.02), error("slower", 0.05), time("slower", 0.03)]
SLOWER += [error("untimed", 0.06), error("refused", 0.07), failed(time("refused", 1.0), "oom", "")]
ALIKE = [error("near", 0.05), timed("near", 512, [0.01 * x for x in reversed(SPREAD)], **SHAPE)]
SLOWER_ONES = (
    "slow (error 0.05, 0.5× at 512 tokens, slower), slower (error 0.05, 0.333× at 512 tokens, slower), "
    "untimed (error 0.06, not timed), refused (error 0.07, not timed)"
)
FASTER_ONES = "slow (error 0.05, 1.11× at 512 tokens), quick (error 0.09, 2.00× at 512 tokens)"


@pytest.mark.parametrize(
    ("records", "limit", "claim"),
    [
        (
            [*ALL, *NEAR],
            0.1,
            f"Within 10 % output error and faster: {FASTER_ONES}. Next of the faster: window",
        ),
        (ALL, 0.3, "Within 30 % output error and faster: window (error 0.3, 2.50× at 512 tokens)."),
        # Baselines and references are no candidates.
        (
            ALL,
            0.299,
            "No backend stays within 29.9 % output error. Closest of the faster: window (error 0.3, 2",
        ),
        ([*EXACT, *BASELINES], 0.1, ""),
        ([*EXACT, *WINDOW, error("uniform attention", 0.31)], 0.1, "(error 0.3, 2.50× at 512 tokens)."),
        ([*EXACT, *WINDOW, error("uniform attention", 0.29)], 0.1, "No faster backend is more accurate tha"),
        # Without a time of exact attention there is no speed.
        (
            [EXACT[0], *WINDOW],
            0.1,
            "No backend stays within 10 % output error. Closest: window (er",
        ),
        ([*UNEVEN, *LONGER], 0.1, ": near (error 0.05, 0.998× at 1024 tokens, slower)."),
        ([*EXACT, *ALIKE], 0.1, ": near (error 0.05, 1.00× at 512 tokens, as fast)."),
        ([*EXACT, *SLOWER], 0.1, f"Within 10 % output error: {SLOWER_ONES}."),
        ([EXACT[0], *SLOWER[:2]], 0.1, "Within 10 % output error: slow (error 0.05, not decided)."),
        (UNEVEN, 0.1, "near (error 0.05, 0.91×? at 512 tokens, not decided). Background load 83 %. Rerun on"),
        (SKIPPED, 0.1, "Error unknown: near (not measured at 256)."),
        ([*SKIPPED[:-1], failed(SKIPPED[-1], "oom", "")], 0.1, "No backend stays within 10 %"),
        # The worst layer decides.
        (
            LAYERED,
            0.1,
            "No backend stays within 10 % output error on every layer. Closest of the faster: window (er",
        ),
        (LAYERED, 0.3, "Within 30 % output error on every layer and faster: window (error 0.3, 2.50×"),
        ([error("near", 0.3, inputs="stitched(layer=1)")], 0.1, "Concatenated documents, layer 1: No ba"),
        ([EXACT[1], WINDOW[1]], 0.1, "12 heads of 32, float32, 2 CPU threads: window (2.50× at 512 tokens)."),
    ],
)
def test_the_sentence_goes_no_further_than_the_measurements(records, limit, claim):
    texts = Bench(max_error=limit).view("sentences", records, Run(Settled(), load=0.83))
    # Where no candidate was measured there is nothing to say.
    assert len(texts) == bool(claim) and all(claim in text for text in texts)


MODELS = {
    "encoder": (SHAPE, (0, 1)),
    "decoder": ({"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "causal": True}, (18, 19)),
}
CANDIDATES = ("window", "linformer", "performer")


def drawn_run(draw):
    """Some of the records of a run of two models, and failures, by model."""
    models = {model: [] for model in MODELS}
    for model, (shape, layers) in MODELS.items():
        records = []
        for label in ("exact", "exact-dense", "uniform attention", "linear-relu", *CANDIDATES):
            usual = draw.choice((0.05, 0.1, 0.5))
            for tokens, layer in product((256, 512), layers):
                value = draw.choice((*[usual] * 18, 0.101, None))
                place = {"tokens": tokens, "inputs": f"{model}(layer={layer})", "shape": shape}
                records.append(error(label, value, **place))
            for tokens in (256, 512, 1024, 2048) if label != "uniform attention" else ():
                seconds = tokens * draw.choice((1, 2, 2.1, 4)) * (tokens / 256 if label == "exact" else 1)
                rounds = [seconds * draw.choice((0.98, 1, 1.02)) for _ in range(draw.choice((1, 4, 8)))]
                memory = Record(case=case("memory", label, tokens, **shape), peak_bytes=draw.randint(0, 99))
                records += [timed(label, tokens, rounds, **shape), memory]
        for record in records:
            status = draw.choice((*["ok"] * 14, "skipped", "oom", "unsupported", "absent"))
            models[model] += {"ok": [record], "absent": []}.get(status, [failed(record, status)])
    return models


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_no_sentence_says_more_than_any_records_of_a_run_hold(draw):
    models = drawn_run(draw)
    records = [record for model in models.values() for record in model]
    Bench(column=draw.choice(COLUMNS)).view("tables", records, UNDISTURBED)
    Bench().view("plots", records, UNDISTURBED)
    for text in Bench().view("sentences", records, UNDISTURBED):
        group = models["decoder" if text.startswith("Decoder") else "encoder"]
        errors = [record for record in group if record.case.kind == "error"]
        places = {(record.case.tokens, record.case.inputs) for record in errors}
        speeds = {row.label: row.ratios for row in speed_ups(curves(group, "time_s"))}
        for claim in text.partition(": ")[2].split(". "):
            for label, details in re.findall(r"([\w-]+) \(((?:error|not measured)[^()]*)\)", claim):
                results = [x for x in errors if x.case.label == label and x.output_relative_error is not None]
                values = {(x.case.tokens, x.case.inputs): x.output_relative_error for x in results}
                assert label in CANDIDATES, text
                nearest = claim.startswith(("Closest", "Next")) or ": Closest" in claim
                assert (max(values.values()) > 0.1) == nearest, text
                assert nearest or (places == values.keys()) == ("Error unknown" not in claim), text
                # What is measured decides; predicted speeds are marked.
                if "and faster" in claim:
                    tokens = int(re.search(r" at (\d+) tokens", details)[1])
                    assert speeds[label][max(speeds[label])].outcome == FASTER, text
                    assert (tokens in speeds[label]) != ("~" in details), text


def test_the_headings_name_the_lengths_of_errors_and_of_times_beyond_them():
    plan = study("bench", ["window"], inputs="encoder", seq_lens=(512, 513), threads=1)
    points = {(point.case.kind, point.case.tokens) for point in points_of(plan)}
    assert points == {("error", 512), *((kind, n) for kind in ("time", "memory") for n in (512, 513))}
    table = table_of([*ALL, *LONGER])
    assert table.columns[:3] == ("backend", "error, 512 tokens", "speed-up, 1024 tokens")
    cells = {row[0]: row[1:3] for row in table.rows}
    assert cells["window"] == ("0.3", "–") and cells["near"][0] == "–"


def test_a_row_that_reads_all_keys_says_so_and_is_never_the_best():
    records = [*ALL, *NEAR, error("wide", 1e-7, density=1.0), time("wide", 0.001)]
    table = table_of(records)
    cells = {row[0]: row for row in table.rows}
    assert cells["wide"][1] == "1e-07 all keys" and cells["exact"][1] == "3e-07"
    assert {table.rows[row][0] for row, _ in table.best} == {"slow", "window"}


@pytest.mark.parametrize("limit", [0.1, 1e-9])
def test_an_error_of_all_keys_is_unknown_at_longer_lengths(limit):
    wide = [error("wide", 1e-7, density=1.0), time("wide", 0.001)]
    longer = [time("exact", 0.04, 1024), time("wide", 0.002, 1024)]
    (alike,) = Bench(max_error=limit).view("sentences", [*EXACT, *wide], UNDISTURBED)
    assert "wide (error 1e-07, 10.0× at 512 tokens" in alike
    records = [*EXACT, *wide, *longer]
    words = "wide at 1024 tokens (reads all keys at 512, where errors are measured)"
    (sentence,) = Bench(max_error=limit).view("sentences", records, UNDISTURBED)
    assert sentence == f"Encoder, layer 1: Error unknown: {words}."
    chart = Bench().view("plots", records, UNDISTURBED)["bench"].charts[0]
    assert "wide" not in {line.label for line in chart.series}
    # Further errors with unread keys hold.
    partial = error("wide", 0.05, tokens=768, density=0.5)
    (comparison,) = comparisons([*records, partial, error("exact", 3e-7, tokens=768)])
    assert comparison.within(0.1, 1024)[0] == [comparison.row("wide")]


def test_the_budget_leaves_predicted_speeds_marked_and_a_sentence_on_the_way_to_go_on():
    lengths = (256, 512, 1024)
    records = [error(label, 0.05) for label in ("exact", "window")]
    records += [time(label, 1e-8 * n * x, n) for n in lengths for label, x in (("exact", n), ("window", 300))]
    records += [failed(time("exact", 1.0, 2048)), time("window", 1e-8 * 2048 * 300, 2048)]
    table = table_of(records)
    assert table.columns[2] == "speed-up, 2048 tokens"
    assert table.rows[1][2].startswith("~6.8") and not table.rows[1][2].endswith("?")
    assert "~: extrapolated from shorter lengths." in " ".join(table.notes)
    skipped = "1 point skipped (budget): time at 2048 tokens."
    assert table.notes[-1] == f"{skipped} Continue: --out FOLDER --resume with a larger --budget."
    assert "window (error 0.05, ~6.8" in Bench().view("sentences", records, UNDISTURBED)[0]


def test_the_last_sentence_says_that_no_crossover_is_decided():
    open_ = [*UNEVEN, LONGER[0], timed("near", 1024, [0.024, 0.08, 0.016, 0.12], **SHAPE)]
    assert Bench().view("sentences", open_, UNDISTURBED)[-1] == "No crossover decided yet."
    decided = [error("quick", 0.05), time("quick", 0.02), time("quick", 0.02, 1024)]
    for records in (UNEVEN, [*open_, *decided]):
        assert "No crossover" not in " ".join(Bench().view("sentences", records, UNDISTURBED))


def test_backends_that_cannot_be_causal_share_a_line_and_other_refusals_have_reasons():
    refused = [failed(time(x, 1.0), "unsupported", f"Backend {x!r} {NOT_CAUSAL}.") for x in ("a", "b")]
    table = table_of([*ALL, *refused, failed(time("c", 1.0), "unsupported", "no")])
    assert table.notes[2:] == ("c: unsupported: no", "Not causal, or not declared so by a decorator: a, b.")
    assert not {"a", "b", "c"} & {row[0] for row in table.rows}


def test_kernels_of_exact_attention_are_compared_in_digits():
    records = [error("exact(kernel=flash)", 4.3e-7), error("exact(kernel=math)", 0.0)]
    table = table_of([*EXACT, *MEAN, *records])
    digits = table.columns.index("digits, 512 tokens")
    shown = {row[0]: (row[1], row[digits]) for row in table.rows}
    assert shown["exact(kernel=flash)"] == ("4.3e-07", "6.4") and shown["exact"] == ("3e-07", "6.5")
    assert shown["exact(kernel=math)"] == ("0", "16.0") and shown["uniform attention"][1] == "–"
    assert not any("digits" in column for column in table_of([*ALL, *records]).columns)
    assert not any("digits" in column for column in table_of([*EXACT, *MEAN, BASELINES[-1]]).columns)


def test_an_option_chooses_the_fifth_column():
    window = error("window", 0.3, output_mse=0.02, density=0.25)
    memory = Record(case=case("memory", "window", 512, **SHAPE), peak_bytes=1, state_bytes=2048)
    cells = {"time": ("10.0", "4.00"), "mse": ("–", "0.02"), "keys": ("–", "25 %"), "state": ("–", "2.00")}
    for column, shown in cells.items():
        assert tuple(x[-1] for x in table_of([*EXACT, window, WINDOW[1], memory], column).rows) == shown


def test_the_limit_is_kept_with_the_run_and_nonsense_is_refused(tmp_path, undrawn):
    Results(ALL, environment={"study": "bench", "options": {"max_error": 0.3}}).save(tmp_path)
    assert "Within 30 % output error and faster: window" in read(tmp_path).sentences()[0]
    for nonsense in ("much", -1, True, 1e999):
        damaged = Results(ALL, environment={"study": "bench", "options": {"max_error": nonsense}})
        with pytest.raises(DataError, match=r"the run in environment\.json is damaged: max_error"):
            damaged.sentences()


def test_a_backend_that_lacks_a_layer_has_no_error_over_all():
    broken = [record for record in LAYERED if record.case.inputs != "encoder(layer=5)"]
    (comparison,) = comparisons([*broken, *(x for x in LAYERED if x.case.label == "exact")])
    assert {row.label: row.missing for row in comparison.rows} == {"exact": (), "window": (512,)}
    assert comparison.row("exact").errors and not comparison.row("window").errors


def swapped(label, distance, seconds=0.01):
    """Records of a model with another attention in all layers."""
    shared = {"of": "model", "inputs": "model on 3 texts #0"}
    kept = {} if label == OWN else {"mean_pool_distance": distance, "mean_pool_distance_draws": (distance,)}
    times_s = [seconds * factor for factor in (SPREAD if label == OWN else SPREAD[::-1])]
    return [Record(case=case("swap", label, 64, **shared), **kept), timed(label, 64, times_s, **shared)]


def test_the_sentence_of_a_swap_goes_no_further_than_the_measurements():
    candidates = ("window", "linformer", "performer-positive")
    for seconds, count, claim in (
        (0.004, 3, "2 of 3 candidates were not measured: linformer, performer-positive."),
        (0.01001, 1, "least at 64 tokens: mean pool cosine 0.8000, as fast within 10 %"),
    ):
        records = [*swapped(OWN, None), *swapped("window", 0.2, seconds)]
        run = Run(Settled(candidates=candidates[:count]))
        (text,) = swap_sentences([*map(Record.of, records)], run)
        assert claim in text and ("among the candidates measured so far" in text) == (count > 1)


def test_the_first_error_predicts_that_of_exact_attention():
    """Uniform attention is linear, but its error is one against exact attention, as all are."""
    points = points_of(study("bench", ["exact", "linformer"], inputs="encoder", seq_lens=(512,), threads=1))
    errors = {point.case.backend: point.cost for point in points if point.case.kind == "error"}
    assert len(errors) == 3 and len({*errors.values()}) == 1
