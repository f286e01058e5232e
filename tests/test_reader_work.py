"""Work of reading, reporting and comparing records: bounded per record, whatever the speed of the machine."""

import cProfile
import json
import pstats
import time
from statistics import median

import pytest
from made_records import costs, folder

from efficient_attn.measure.records import read
from efficient_attn.studies import results as redraw
from efficient_attn.studies.diff import diff

# Calls of functions per record of costs, about 1.3 times the calls of today.
MOST_CALLS = {"report": 4_000, "diff": 600}


def thousand(path, count=1000):
    """Costs of `count` / 20 backends at ten lengths."""
    labels = ("exact", *(f"window(window={2 * number + 1})" for number in range(count // 20 - 1)))
    return folder(path, costs(labels, [64 << power for power in range(10)]))


def calls_of(work):
    """Number of function calls: the same in every run, on every machine and under every load."""
    profile = cProfile.Profile()
    profile.runcall(work)
    return pstats.Stats(profile).total_calls


def report(run):
    redraw.report(run, html=run / "page.html")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "work"), [("report", report), ("diff", lambda run: diff(run, run).tables())]
)
def test_work_grows_in_proportion_to_the_records(name, work, tmp_path):
    runs = [thousand(tmp_path / str(count), count) for count in (40, 500, 1000)]
    # The first pass fills caches and imports modules.
    work(runs[0])
    half, whole = (calls_of(lambda run=run: work(run)) for run in runs[1:])
    assert whole < 2.2 * half and whole < 1000 * MOST_CALLS[name], (half, whole)


@pytest.mark.serial
def test_reading_a_thousand_records_takes_little_more_than_parsing_their_json(tmp_path):
    path = thousand(tmp_path / "run") / "records.jsonl"

    def parse():
        with open(path, encoding="utf-8") as file:
            return [json.loads(text) for text in file]

    def seconds(work):
        start = time.perf_counter()
        assert len(work()) == 1000
        return time.perf_counter() - start

    ratios = [seconds(lambda: read(path).records) / seconds(parse) for _ in range(15)]
    # The median over alternating pairs: other work on the machine slows both.
    assert median(ratios) < 2, ratios
