"""Reports: one page that needs nothing else, drawn from records alone."""

import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from made_records import case, costs, errors, folder

from efficient_attn.errors import DataError, OptionError
from efficient_attn.runner.records import Record
from efficient_attn.studies import report as redraw
from efficient_attn.studies.reading import read

FAILED = [
    Record(case=case("time", "exact-dense", tokens), status="skipped", reason="needs 3 GiB")
    for tokens in (1024, 2048)
]


class Page(HTMLParser):
    """What a page consists of: elements with the names of their attributes, ids, references, text."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.ids, self.references, self.texts = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, tuple(sorted(name for name, _ in attributes))))
        self.ids += [value for name, value in attributes if name == "id"]
        self.references += [value for name, value in attributes if name in ("href", "src")]
        self.references += re.findall(r"url\(([^)]*)\)", str(dict(attributes)))

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def page_of(*folders, tmp_path):
    redraw.report(*folders, html=tmp_path / "page.html")
    return (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_page_loads_nothing_and_runs_no_script(tmp_path):
    text = page_of(folder(tmp_path / "run", costs() + errors()), tmp_path=tmp_path)
    page = Page(text)
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in text
    images = [one for one in page.references if one.startswith("data:image/svg+xml;base64,")]
    others = [one for one in page.references if one not in images]
    assert len(images) == 3 and all(one.startswith("#") and one[1:] in page.ids for one in others)
    assert not {"script", "link", "svg", "iframe", "object"} & {tag for tag, _ in page.elements}
    assert not any(name.startswith("on") for _, names in page.elements for name in names)
    assert "@import" not in text and "url(http" not in text


def test_no_two_elements_share_an_id(tmp_path):
    runs = [folder(tmp_path / name, costs() + errors()) for name in ("a", "b")]
    page = Page(page_of(*runs, tmp_path=tmp_path))
    assert len(page.ids) == len(set(page.ids))


def test_the_page_tells_sentences_plots_tables_method_command_and_environment(tmp_path):
    run = folder(
        tmp_path / "run", [*costs(), *FAILED], {"processor": "Babbage 2", "utc": "2026-01-02T03:04Z"}
    )
    text = page_of(run, tmp_path=tmp_path)
    page = Page(text)
    for sentence in read(run).sentences():
        assert sentence in page.text
    assert text.count("; the numbers are in the tables.") == 2
    assert "Measured on 2026-01-02 on Babbage 2" in page.text
    assert "2 CPU threads" in text and "efficient-attn bench --seq-len 256" in page.text
    assert "skipped: needs 3 GiB" in page.text


def test_the_page_can_be_read_without_seeing_it(tmp_path):
    page = Page(page_of(folder(tmp_path / "run", costs()), tmp_path=tmp_path))
    headings = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == 1 and headings.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(headings))
    assert all("scope" in names for tag, names in page.elements if tag == "th")
    plots = [names for tag, names in page.elements if tag == "img"]
    assert len(plots) == 2 and all("alt" in names for names in plots)


def test_runs_without_records_and_runs_of_failures_alone_are_told(tmp_path):
    empty, failed = folder(tmp_path / "empty", []), folder(tmp_path / "failed", FAILED)
    page = Page(page_of(empty, tmp_path=tmp_path))
    assert "Nothing was measured" in page.text and "img" not in dict(page.elements)
    page = Page(page_of(failed, tmp_path=tmp_path))
    assert "2 of 2 points could not be measured" in page.text and "img" not in dict(page.elements)


def test_long_names_are_shortened(tmp_path):
    labels = ("exact", "a" * 10_000, "a" * 5000 + "b" + "a" * 4999)
    text = page_of(folder(tmp_path / "run", costs(labels)), tmp_path=tmp_path)
    assert max(map(len, re.findall(r"a{20,}", text))) < 300


@pytest.mark.slow
def test_several_runs_stand_side_by_side_with_their_own_names(tmp_path):
    runs = [folder(tmp_path / name / "bench", costs(), {"processor": name}) for name in ("laptop", "server")]
    paths = redraw.report(*runs, out=tmp_path / "both")
    names = {path.name for path in paths}
    assert {"laptop-bench-time.png", "server-bench-summary.csv", "tables.md", "report.html"} <= names
    page = Page((tmp_path / "both" / "report.html").read_text(encoding="utf-8"))
    assert "2 runs side by side" in page.text
    assert (
        page.text.count("Time per call, ms: laptop/bench")
        == page.text.count("Time per call, ms: server/bench")
        == 1
    )


@pytest.mark.slow
def test_the_files_of_a_report_are_the_same_bytes_again_and_records_stay(tmp_path):
    run = folder(tmp_path / "run", costs() + errors())
    records = (run / "records.jsonl").read_bytes()
    paths = redraw.report(run)
    names = {path.name for path in paths}
    assert names >= {
        "report.html",
        "summary.csv",
        "tables.md",
        "time.svg",
        "memory.pdf",
        "error.png",
    }
    first = {path: path.read_bytes() for path in paths}
    assert {path: path.read_bytes() for path in redraw.report(run)} == first
    assert (run / "records.jsonl").read_bytes() == records
    assert {path.name for path in run.iterdir()} == names | {
        "records.jsonl",
        "environment.json",
        "command.txt",
    }


def test_a_run_is_drawn_when_it_is_saved_and_a_failure_to_draw_is_a_note(tmp_path, monkeypatch):
    results = read(folder(tmp_path / "run", costs()))
    results.save(tmp_path / "again")
    assert (tmp_path / "again" / "report.html").exists() and results.notes == ()

    def fail(*_, **__):
        raise ZeroDivisionError("no ink")

    monkeypatch.setattr("efficient_attn.report.files.page", fail)
    results.save(tmp_path / "third")
    assert read(tmp_path / "third").records == results.records
    assert (
        len(results.notes) == 1
        and "no ink" in results.notes[0]
        and "efficient-attn report" in results.notes[0]
    )


def test_wrong_requests_are_named(tmp_path):
    run = folder(tmp_path / "run", costs())
    with pytest.raises(OptionError, match="named twice"):
        redraw.report(run, run / "records.jsonl")
    with pytest.raises(OptionError, match="exclude each other"):
        redraw.report(run, html="a", out="b")
    with pytest.raises(DataError, match="Cannot read records"):
        redraw.report(tmp_path)
    (run / "environment.json").write_text("[]")
    with pytest.raises(DataError, match="no JSON object"):
        redraw.report(run)


def test_the_command_needs_no_torch(tmp_path):
    run = folder(tmp_path / "run", costs() + errors())
    code = "import sys; sys.modules['torch'] = None\nfrom efficient_attn_cli.main import main; main()"
    words = [sys.executable, "-c", code, "report", str(run), "--html", str(tmp_path / "page.html")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(tmp_path / "page.html"), "")


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:constrained_layout not applied")
@pytest.mark.parametrize("value", [0.0, 5e-324, 1e308])
def test_numbers_that_no_logarithmic_axis_can_hold_stay_in_the_tables(tmp_path, value):
    odd = [
        replace(record, times_s=(value,) * 3, peak_bytes=0) if record.case.kind != "error" else record
        for record in costs()
    ]
    wrong = [
        replace(record, output_relative_error=value, output_relative_error_draws=(value,))
        for record in errors()
    ]
    page = Page(page_of(folder(tmp_path / "run", [*odd, *wrong]), tmp_path=tmp_path))
    assert "Time per call, ms" in page.text and "Relative output error" in page.text


def test_an_environment_of_any_shape_is_shown(tmp_path):
    strange = {
        "gpu": [1, {"a": 2}],
        "torch": 5,
        "packages": ["x"],
        "command": "y",
        "utc": 7,
        "memory_bytes": 10**400,
    }
    page = Page(page_of(folder(tmp_path / "run", costs(), strange), tmp_path=tmp_path))
    assert "Environment" in page.text
