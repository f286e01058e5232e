"""Work of reading, reporting and comparing records: bounded per record, whatever the speed of the machine."""

import cProfile
import pstats

import pytest
from synthetic_records import costs, folder

from efficient_attn.measure.record import read
from efficient_attn.runs import results
from efficient_attn.tools.diff import diff


def made_run(path, count):
    """Costs of `count` / 20 backends at ten lengths."""
    labels = ("exact", *(f"window(window={2 * number + 1})" for number in range(count // 20 - 1)))
    return folder(path, costs(labels, [64 << power for power in range(10)]))


def calls_of(work, run):
    """Number of function calls: the same in every run, on every machine and under every load."""
    profile = cProfile.Profile()
    profile.runcall(work, run)
    return pstats.Stats(profile).total_calls


# Calls of functions per record of costs, about 1.3 times the calls of today.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "most"),
    [
        pytest.param(lambda run: read(run / "records.jsonl"), 24, id="read"),
        pytest.param(lambda run: diff(run, run).tables(), 600, id="diff"),
        pytest.param(lambda run: results.report(run), 5700, id="report"),
    ],
)
def test_work_grows_in_proportion_to_the_records(work, most, tmp_path, monkeypatch):
    # Figures are drawn for the page; writing each as files of three kinds is work of matplotlib.
    monkeypatch.setattr("efficient_attn.report.files.KINDS", ())
    runs = [made_run(tmp_path / str(count), count) for count in (40, 500, 1000)]
    # The first pass fills caches and imports modules.
    work(runs[0])
    half, whole = (calls_of(work, run) for run in runs[1:])
    assert whole < 2.2 * half and whole < 1000 * most, (half, whole)
