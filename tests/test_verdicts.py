"""Verdicts go no further than their measurements: noise, an interrupt and counted operations."""

import signal

import pytest
from made_records import case, costs

import efficient_attn as ea
from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import OWN
from efficient_attn.stats.candidates import CANDIDATES, exact_operations
from efficient_attn.stats.noise_warnings import DURING
from efficient_attn.studies.bench.view import sentences as bench_sentences
from efficient_attn.studies.results import read
from efficient_attn.studies.swap.view import sentences as swap_sentences
from efficient_attn.studies.swap.view import tables as swap_tables
from efficient_attn.studies.view import NOT_MEASURED

SPREAD = [1 + step / 1000 for step in range(-4, 5)]
PLACE = {"inputs": "encoder(layer=1)", "num_heads": 12, "head_dim": 32}
BUSY = {DURING: [{"others_share": 0.83}]}


def measured(label, error, seconds=None, **more):
    made = [
        Record(
            case=case("error", label, 512, of="output", **PLACE),
            output_relative_error=error,
            output_relative_error_draws=(error,),
        )
    ]
    if seconds is not None:
        # Rounds in which exact attention is slow are those in which the others are fast.
        times_s = tuple(seconds * one for one in (SPREAD if label == "exact" else SPREAD[::-1]))
        made.append(
            Record(case=case("time", label, 512, **PLACE), times_s=times_s, round_sizes=(1,) * 9, **more)
        )
    return made


ALL = [
    *measured("exact", 3e-7, 0.01),
    *measured("window", 0.3, 0.004),
    *measured("exact-dense", 2e-7, 0.03),
]


def verdict(records, environment=None):
    return bench_sentences(records, environment or {})[0]


@pytest.mark.parametrize("environment", [BUSY, {DURING: "much"}, {DURING: [None]}])
def test_intervals_decide_whatever_the_load(environment):
    records = [*ALL, *measured("near", 0.05, 0.001, waited_s=0.2)]
    assert "both within 10 % of exact and faster: near (error 0.05, 10.0x" in verdict(records, environment)
    for sentences in (bench_sentences, swap_sentences, bench_sentences):
        for kind in (records, SWAPPED, costs()):
            assert sentences(kind, environment) == sentences(kind, {})


def test_errors_alone_decide_where_nothing_is_near():
    told = verdict(ALL[:4])
    assert told.endswith(
        "nothing but exact is within 10 % of it, whatever the times; nearest: window (error 0.3)."
    )


def test_a_near_one_without_a_time_leaves_it_open():
    told = verdict([*ALL[:4], *measured("near", 0.05, 0.001)[:1]])
    wanted = "open whether anything is both within 10 % of exact and faster; not timed: near (error 0.05)."
    assert wanted in told and "nothing" not in told


def test_times_that_overlap_are_unclear_and_the_remedy_is_named():
    told = verdict([*ALL, *measured("near", 0.05, 0.01001)])
    assert "unclear whether anything is both" in told
    assert "the times of near and exact overlap; more --rounds would settle it" in told


def test_an_interrupted_comparison_names_the_candidates_it_did_not_measure():
    listed = {CANDIDATES: ["exact", "window", "exact-dense", "linformer", "performer-trig"]}
    told = verdict([*ALL, *measured("linformer", 0.05)], listed)
    assert "nothing measured so far is both" in told and "is the answer" not in told
    assert told.endswith("Not measured (2 of 5 candidates): linformer, performer-trig.")


@pytest.mark.parametrize("listed", [None, "exact", 7, {"exact": 1}, [1, None]])
def test_a_strangers_list_of_candidates_is_read_as_none(listed):
    assert verdict(ALL, {CANDIDATES: listed}) == verdict(ALL)


def test_interrupting_a_comparison_keeps_the_list_of_candidates_in_its_folder(tmp_path):
    calls = []

    def stops(q, k, v):
        calls.append(1)
        if len(calls) > 1:
            signal.raise_signal(signal.SIGINT)
        return v

    results = ea.bench(
        ["exact", stops, "window"], inputs="encoder", seq_lens=24, rounds=1, isolate="none", out=tmp_path
    )
    assert results.interrupted and len(calls) == 2
    assert results.environment[CANDIDATES] == ["exact", "stops", "window"]
    assert read(tmp_path).environment[CANDIDATES] == ["exact", "stops", "window"]


def test_what_saves_few_operations_or_none_is_named_with_its_share():
    whole = exact_operations(ALL[0].case)
    more = [
        *measured("linformer(rank=256)", 0.4, 0.02, flops=whole),
        *measured("window(window=513)", 0.1, 0.02, flops=int(0.76 * whole)),
        *measured("small", 0.3, 0.02, flops=whole // 2),
    ]
    told = bench_sentences([*ALL, *more], {})[1]
    assert told == (
        "Approximations that save few operations or none at 512 tokens (exact attention = 1): "
        "window(window=513) (0.76x), linformer(rank=256) (1.00x)."
    )


@pytest.mark.parametrize(
    ("backend", "options"),
    [("window", {"window": 25}), ("window", {"window": 47}), ("linformer", {"rank": 12})],
)
def test_a_window_wider_than_the_text_and_a_rank_of_half_of_it_are_named(backend, options):
    wanted = {backend: {name: [value] for name, value in options.items()}}
    results = ea.bench([backend], inputs="encoder", options=wanted, seq_lens=24, rounds=1, isolate="none")
    (inner,) = (f"{name}={value}" for name, value in options.items())
    assert any("save" in told and f"{backend}({inner}) (" in told for told in results.sentences())


def swapped(label, distance, seconds=0.01, **more):
    shared = {"of": "model", "inputs": "model on 3 texts #0", **more}
    kept = {} if label == OWN else {"mean_pool_distance": distance, "mean_pool_distance_draws": (distance,)}
    times_s = tuple(seconds * one for one in (SPREAD if label == OWN else SPREAD[::-1]))
    return [
        Record(case=case("swap", label, 64, **shared), **kept),
        Record(case=case("time", label, 64, **shared), times_s=times_s, round_sizes=(1,) * 9),
    ]


SWAPPED = [*swapped(OWN, None, 0.01), *swapped("window", 0.2, 0.004)]


def test_an_interrupted_swap_names_the_candidates_it_did_not_measure():
    (told,) = swap_sentences(SWAPPED, {CANDIDATES: ["window", "linformer", "performer-positive"]})
    assert "stays nearest to itself with window among the candidates measured so far" in told
    assert told.endswith("Not measured (2 of 3 candidates): linformer, performer-positive.")


def test_a_complete_swap_names_no_missing_candidates():
    (told,) = swap_sentences(SWAPPED, {CANDIDATES: ["window"]})
    assert "so far" not in told and "Not measured" not in told and "2.50x as fast as before" in told


def test_exact_attention_in_the_place_of_a_models_own_has_no_speed():
    (table,) = swap_tables([*SWAPPED, *swapped("exact", 0.0, 0.0075)], {})
    speed = table.columns.index("speed, own = 1")
    speeds = {row[0]: row[speed].partition(" ")[0] for row in table.rows}
    assert speeds == {OWN: "1", "window": "2.50x", "exact": NOT_MEASURED}


def test_the_speed_of_a_swap_is_open_within_the_noise():
    (told,) = swap_sentences([*SWAPPED[:2], *swapped("window", 0.2, 0.01001)], {})
    assert "0.999x (0.919 to 1.09) as fast as before, which leaves open whether it is faster" in told
