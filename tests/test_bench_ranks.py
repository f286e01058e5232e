"""Benchmarks on several ranks: the cost model, views, refusals, and processes that fail together."""

import json
from textwrap import dedent

import numpy as np
import pytest
from made_records import case, folder

import efficient_attn as ea
from efficient_attn.measure.environment import usable_cores
from efficient_attn.measure.links import fit_link
from efficient_attn.runner.record import Record
from efficient_attn.studies import find
from efficient_attn.studies.bench.rank_view import rank_points
from efficient_attn.studies.bench.ranks import joined

STEPS = np.array([1, 2] * 6)
SIZES = np.array([4 ** (5 + i // 2) for i in range(12)])
LINK = {"link_latency_s": 1e-4, "link_latency_error_s": 1e-5, "link_byte_s": 1e-9, "link_byte_error_s": 1e-10}


def test_a_link_is_fitted_to_steps_and_bytes_with_its_standard_errors():
    exact = fit_link(STEPS, SIZES, STEPS * 2e-4 + SIZES * 3e-9)
    assert exact.latency_s == pytest.approx(2e-4) and exact.byte_s == pytest.approx(3e-9)
    assert exact.latency_error_s < 1e-9 and exact.byte_error_s < 1e-14
    assert exact.link.seconds(1000) == pytest.approx(2e-4 + 3e-6)

    draws = np.random.default_rng(0).normal(1, 0.01, (4000, 12))
    fits = [fit_link(STEPS, SIZES, (STEPS * 2e-4 + SIZES * 3e-9) * draw) for draw in draws]
    for name, true in (("latency", 2e-4), ("byte", 3e-9)):
        deviations = [(getattr(one, f"{name}_s") - true) / getattr(one, f"{name}_error_s") for one in fits]
        # Standard error of the standard deviation of Student's t with 10 degrees of freedom, of kurtosis 4.
        error = ((4 - 1) / len(deviations)) ** 0.5 / 2
        assert np.std(deviations) == pytest.approx((10 / 8) ** 0.5, rel=5 * error)


def test_a_link_for_predictions_is_never_negative():
    link = fit_link(STEPS, SIZES, SIZES * 1e-9).link
    assert link.latency_s >= 0 and fit_link(STEPS, SIZES, STEPS * 1e-4).link.seconds(10**9) < 2.0


def on_ranks(ranks, times_s, own_times_s, label="exact", **measured):
    """Four rounds of one call."""
    return Record(
        case=case("time", label, 1024, ranks=ranks),
        times_s=times_s,
        own_times_s=own_times_s,
        round_sizes=(1,) * len(times_s),
        **measured,
    )


def made():
    return [
        on_ranks(1, (0.4,) * 4, (0.4,) * 4, expected_exchange_s=0.0, exchange_bytes=(0, 0)),
        on_ranks(2, (0.25,) * 4, (0.19,) * 4, expected_exchange_s=0.01, exchange_bytes=(32, 4096), **LINK),
        Record(
            case=case("time", "window-clusters", 1024, ranks=2), status="unsupported", reason="reads no rank"
        ),
    ]


def test_times_predictions_and_refusals_are_read_again_and_shown(tmp_path):
    results = ea.read(folder(tmp_path / "run", made(), {"study": "bench"}))
    times, model = results.tables()
    assert times.rows == (
        ("exact", "1024", "1", "400", "2560", "", "2", "0"),
        ("exact", "1024", "2", "250", "2048", "1.60x", "2", "4096"),
    )
    assert "window-clusters: unsupported: reads no rank" in times.notes
    assert model.rows[1] == ("exact", "1024", "2", "190", "10.0", "200", "250", "1.25")
    assert "2 ranks: α = 100 µs (± 10 µs), β = 1 ns a byte (± 0.1)" in model.notes[1]
    assert results.sentences() == [
        "Measured over predicted time on 2 ranks: median 1.25, 1.25 to 1.25; 1 of 1 points are within 25%."
    ]
    ((chart,),) = results.plots()["ranks"].rows
    assert [list(one.y) for one in chart.series] == [[0.4, 0.2], [0.4, 0.25]]
    assert list(results.to_pandas()["ranks"]) == [1, 2, 2]


def test_a_changed_time_and_more_bytes_on_ranks_are_found_by_diff(tmp_path):
    slower = [made()[0], on_ranks(2, (0.5,) * 4, (0.19,) * 4, exchange_bytes=(32, 8192))]
    rows = ea.diff(folder(tmp_path / "old", made()), folder(tmp_path / "new", slower)).comparison.changes
    found = {(one.name, one.quantity): one.verdict for one in rows}
    assert found["exact, ranks=2", "exchange_bytes"] == "regression"
    assert found["exact, ranks=2", "time_s"] == "regression"
    assert found["exact, ranks=1", "time_s"] == "unchanged"


def test_points_of_ranks_are_not_curves_of_one_process(tmp_path):
    alone = [Record(case=case("time", "exact", n), times_s=(0.1,) * 4, round_sizes=(1,) * 4) for n in (8, 16)]
    results = ea.read(folder(tmp_path / "run", [*alone, *made()], {"study": "bench"}))
    assert [row[:3] for row in results.tables()[0].rows] == [("exact", "100", "100")]
    assert len(rank_points(results.records)) == 2


def test_rounds_are_joined_with_the_own_work_of_each():
    record = joined([on_ranks(2, (0.2, 0.3), (0.1, 0.15)), on_ranks(2, (0.4, 0.5), (0.2, 0.25))])
    assert record.times_s == (0.2, 0.3, 0.4, 0.5) and record.own_times_s == (0.1, 0.15, 0.2, 0.25)


def plan(**options):
    return find("bench").plan(**{"backends": ["window"], "ranks": (1, 2), "seq_lens": (256, 512), **options})


def test_every_backend_is_planned_on_all_ranks_with_a_core_for_each_thread():
    made = plan()
    cases = [(one.case.label, one.case.tokens, one.case.ranks) for one in made.points]
    assert cases == [(a, n, p) for n in (256, 512) for a in ("exact", "window") for p in (1, 2)]
    assert {one.case.threads for one in made.points} == {max(1, usable_cores() // 2)}
    assert bool(made.notes) == (usable_cores() < 2)
    many = plan(ranks=(2 * usable_cores(),), seq_lens=(2 * usable_cores(),))
    assert f"{2 * usable_cores()} ranks of 1 thread share {usable_cores()} cores" in many.notes[0]


def test_a_backend_that_was_refused_is_not_asked_again():
    made = plan()
    made.observe(Record(case=made.points[2].case, status="unsupported", reason="no"))
    assert [one.needed() for one in made.points] == [True, True, False, False] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": (0,)}, r"ranks are whole numbers above 0, such as 1,2,4, not \(0,\)"),
        ({"ranks": ()}, "ranks are whole numbers above 0"),
        ({"of": "block"}, "ranks and of exclude each other: ranks time attention alone"),
        ({"compile": True}, "ranks and compile exclude each other"),
        ({"isolate": "none"}, "ranks and isolate exclude each other"),
        ({"seq_lens": (256, 257)}, "seq_lens: 257 tokens are not shared equally by 2 ranks"),
        ({"backends": [lambda q, k, v: v]}, "exists in this process only; name it as file.py:object"),
    ],
)
def test_a_wrong_request_is_refused(options, message):
    with pytest.raises(ea.OptionError, match=message):
        plan(**options)


OWN = """
    import os, signal, time
    import torch.distributed as dist
    from torch import nn
    from efficient_attn.registry import BackendSpec, Capabilities, NoOptions

    def spec(name, end):
        def build(problem, options):
            if dist.is_initialized() and dist.get_rank() == 1:
                end()
            return nn.Identity()

        reads = Capabilities(causal=False, sharded="keys")
        return BackendSpec(name=name, summary="", options_type=NoOptions, capabilities=reads, builder=build)

    def plain(q, k, v):
        return v

    killed = spec("killed", lambda: os.kill(os.getpid(), signal.SIGKILL))
    hung = spec("hung", lambda: time.sleep(600))
"""


@pytest.mark.slow
def test_ranks_measure_together_and_a_lost_one_ends_its_case_alone(tmp_path):
    (tmp_path / "own.py").write_text(dedent(OWN))
    lost = [f"{tmp_path}/own.py:{name}" for name in ("plain", "killed", "hung")]
    results = ea.bench(
        ["performer-positive", "window-clusters", *lost],
        ranks=(2,),
        seq_lens=256,
        rounds=1,
        num_heads=2,
        timeout_s=4,
        out=tmp_path / "run",
    )
    found = {one.case.label: one for one in results.records}
    assert {label: one.status for label, one in found.items()} == {
        "exact": "ok",
        "performer-positive": "ok",
        "window-clusters": "ok",
        "own.py:plain": "unsupported",
        "own.py:killed": "crash",
        "own.py:hung": "timeout",
    }
    assert "rank 1: the process crashed with signal 9" in found["own.py:killed"].reason
    assert "cannot read the tokens of other ranks" in found["own.py:plain"].reason
    # The comparison of calls; then maxima and sums of 2 heads of 256 features, of 64 values and a one.
    assert found["performer-positive"].exchange_bytes == (32, 2 * 256 * 4, 2 * 256 * 65 * 4)
    for label in ("exact", "performer-positive"):
        record = found[label]
        assert len(record.own_times_s) == len(record.times_s) and len(record.round_sizes) == 1
        assert record.expected_exchange_s > 0 and min(record.times_s) > 0
    # Its queries of one rank and keys of all are no call of one process.
    assert found["window-clusters"].times_s and found["window-clusters"].own_times_s is None
    lines = (tmp_path / "run" / "records.jsonl").read_text().splitlines()
    assert len(lines) == 6 and {json.loads(line)["ranks"] for line in lines} == {2}
