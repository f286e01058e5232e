"""Remarks: each sign that times are uncertain is said with its remedy; a quiet run has none."""

import pytest
from synthetic_records import case

from efficient_attn import bench
from efficient_attn.measure.environment import moment
from efficient_attn.measure.record import Record, replace
from efficient_attn.runs import run as runs
from efficient_attn.runs.results import read
from efficient_attn.stats.noise_warnings import DURING, doubts

STEADY = (1.0, 1.001, 1.002, 1.003, 1.002, 1.001, 1.0)
QUIET, STRANGE = {"others_share": 0.01}, {"others_share": "much", "wall_s": float("nan")}


def record(times_s=STEADY * 4, round_sizes=(7,) * 4):
    return Record(case=case("time", "window", 256), times_s=times_s, round_sizes=round_sizes)


def uneven(factor):
    """Steady rounds, the last one slower."""
    return record(STEADY * 3 + tuple(factor * time_s for time_s in STEADY))


NOISY = "timings scatter by more than 10 % between rounds."
LOADED = "Background load 30 %. Rerun on an idle machine."

# Records, an entry of the conditions during the run, and all sentences on them.
REMARKS = {
    "quiet": ([record()], {}, []),
    "nothing known": ([record(round_sizes=None)], {}, []),
    "no times": ([replace(record(), times_s=None, status="error")], {"others_share": 1.0}, []),
    # Half of log 1.22 is just below 0.1, half of log 1.23 just above.
    "nearly noisy": ([uneven(1.22)], {}, []),
    "noisy": ([record(), uneven(1.23)], {}, [f"1 of 2 {NOISY} Rerun with more --rounds."]),
    "load": ([record()], {"others_share": 0.3}, [LOADED]),
    "noisy under load": ([uneven(1.3)], {"others_share": 0.3}, [f"1 of 1 {NOISY}", LOADED]),
}


@pytest.mark.parametrize("name", REMARKS)
def test_each_sign_of_uncertain_times_is_said_with_its_remedy_and_nothing_else_is(name):
    records, entry, sentences = REMARKS[name]
    assert doubts(records, {DURING: [QUIET, {**QUIET, **entry}]}) == sentences


@pytest.mark.parametrize("broken", [[], {}, "x", None, [3], [STRANGE]])
def test_an_environment_that_makes_no_sense_raises_no_doubt_and_no_error(broken):
    assert doubts([record()], {DURING: broken}) == []
    assert doubts([record(round_sizes=(1.5, None, 3, 4))], {DURING: broken}) == []


def test_doubts_are_notes_of_a_run_and_again_when_its_files_are_read(hasty, undrawn, tmp_path, monkeypatch):
    # The second moment is after a million seconds of work by others.
    others_s = iter([0.0, 1e6])
    monkeypatch.setattr(runs, "moment", lambda: moment()._replace(others_s=next(others_s)))
    small = {"seq_lens": 16, "num_heads": 2, "head_dim": 8, "isolate": "none", "error": False}
    results = bench(["window"], **small, out=tmp_path)
    loaded = [note for note in results.notes if note.startswith("Background load")]
    assert loaded and set(loaded) <= set(read(tmp_path).notes) <= set(results.notes)
