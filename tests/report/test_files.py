"""Reports: a page that needs nothing else, and files with the same bytes, drawn from records alone."""

import base64
import re
import subprocess
import sys
from itertools import pairwise

import pytest
from parsed_pages import Page
from synthetic_records import case, costs, errors, folder

from efficient_attn.measure.record import Record, replace
from efficient_attn.runs import results as redraw
from efficient_attn.runs.results import read

SKIPPED = {"status": "skipped", "reason": "needs 3 GiB"}
FAILED = [Record(case=case("time", "exact-dense", tokens), **SKIPPED) for tokens in (1024, 2048)]
RECORDED = ("records.jsonl", "environment.json")
MACHINE = {
    "processor": "Babbage 2",
    "utc": "2026-01-02T03:04Z",
    "command": ["efficient-attn", "bench", "--seq-len", "256"],
    # Values of shapes that no run of ours writes.
    **{"gpu": [1, {"a": 2}], "torch": 5, "packages": ["x"], "memory_bytes": 10**30},
}
LONG = ("a" * 10_000, "a" * 5000 + "b" + "a" * 4999)


def page_of(run):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("efficient_attn.report.files.KINDS", ())
        redraw.report(run)
    return (run / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with every part that a page can have, and its page."""
    records = [*costs(), *errors(("performer-positive", *LONG)), *FAILED]
    run = folder(tmp_path_factory.mktemp("whole") / "run", records, MACHINE)
    return run, page_of(run)


def test_the_page_loads_nothing_and_runs_no_script(whole):
    text = whole[1]
    page = Page(text)
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in text
    images = [address for address in page.references if address.startswith("data:image/svg+xml;base64,")]
    links = [address for address in page.references if address not in images]
    assert len(images) == 3 and all(link.startswith("#") and link[1:] in page.ids for link in links)
    assert not {"script", "link", "svg", "iframe", "object"} & {tag for tag, _ in page.elements}
    assert not any(name.startswith("on") for _, names in page.elements for name in names)
    assert "@import" not in text and "url(http" not in text


def test_the_page_has_sentences_plots_tables_command_and_environment(whole):
    run, text = whole
    page = Page(text)
    for sentence in read(run).sentences():
        assert sentence in page.text
    assert text.count("; the numbers are in the tables.") == 3
    assert "Babbage 2 · 2026-01-02T03:04Z" in page.text
    assert "2 CPU threads" in text and "efficient-attn bench --seq-len 256" in page.text
    assert "skipped: needs 3 GiB" in page.text


def test_the_page_can_be_read_without_seeing_it(whole):
    page = Page(whole[1])
    headings = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == 1 and headings.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(headings))
    assert all("scope" in names for tag, names in page.elements if tag == "th")
    assert all("alt" in names for tag, names in page.elements if tag == "img")


def test_a_run_without_numbers_has_a_page_without_plots(tmp_path):
    for records, text in (([], "Nothing was measured"), (FAILED, "2 records, 2 of them not measured")):
        page = Page(page_of(folder(tmp_path / text, records)))
        assert text in page.text and "img" not in dict(page.elements)


def test_long_names_are_shortened(whole):
    assert max(map(len, re.findall(r"a{20,}", whole[1]))) < 300


@pytest.mark.slow
def test_the_files_of_a_report_are_the_same_bytes_again_and_records_stay(tmp_path):
    run = folder(tmp_path / "run", costs() + errors())
    records = (run / "records.jsonl").read_bytes()
    paths = redraw.report(run)
    names = {path.name for path in paths}
    assert names >= {"report.html", "summary.csv", "tables.md", "time.svg", "memory.pdf", "error.png"}
    first = {path: path.read_bytes() for path in paths}
    assert base64.b64encode(first[run / "time.svg"]) in first[run / "report.html"]
    assert {path: path.read_bytes() for path in redraw.report(run)} == first
    assert (run / "records.jsonl").read_bytes() == records
    assert {*run.iterdir()} == {*paths, *(run / name for name in RECORDED)}


def test_a_run_is_drawn_when_it_is_saved_and_a_failure_to_draw_is_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr("efficient_attn.report.files.KINDS", ())
    results = read(folder(tmp_path / "run", costs(("exact",))))
    results.save(tmp_path / "again")
    assert (tmp_path / "again" / "report.html").exists() and results.notes == ()

    def fail(*_, **__):
        raise ZeroDivisionError("no ink")

    monkeypatch.setattr("efficient_attn.report.files.render", fail)
    results.save(tmp_path / "third")
    assert read(tmp_path / "third").records == results.records
    (note,) = results.notes
    assert "no ink" in note and "efficient-attn report" in note


@pytest.mark.slow
def test_runs_are_drawn_and_compared_without_torch(tmp_path):
    folder(tmp_path / "run", costs(("exact",)))
    code = (
        "import contextlib, sys; sys.modules['torch'] = None\n"
        "import efficient_attn.report.files; efficient_attn.report.files.KINDS = ()\n"
        "from efficient_attn_cli.main import main\n"
        "with contextlib.suppress(SystemExit): main(['report', 'run', '--out', 'out'])\n"
        "main(['diff', 'run', 'run'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "out/report.html" in done.stdout.splitlines() and "8 comparisons: 8 unchanged" in done.stdout


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:constrained_layout not applied")
@pytest.mark.parametrize("value", [0.0, 5e-324, 1e308])
def test_numbers_that_no_logarithmic_axis_can_hold_stay_in_the_tables(tmp_path, value):
    wrong = [
        replace(record, output_relative_error=value, output_relative_error_draws=(value,))
        if record.case.kind == "error"
        else replace(record, times_s=(value,) * 3, peak_bytes=0)
        for record in costs() + errors()
    ]
    page = Page(page_of(folder(tmp_path / "run", wrong)))
    assert "time per call, ms" in page.text and "Relative output error" in page.text
