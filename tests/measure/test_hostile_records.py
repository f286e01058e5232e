"""A file of records from a stranger, hostile in every text, goes through every output and harms none."""

import csv
import io
import json
import re
from collections import Counter
from types import SimpleNamespace
from xml.etree import ElementTree

import msgspec
import pytest
from parsed_pages import Page
from synthetic_records import case, costs, errors, folder

from efficient_attn.measure.record import Case, Record
from efficient_attn.report.table import csv_cell
from efficient_attn.runs import results as redraw
from efficient_attn.runs.registry import any_record

PAYLOADS = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "</style></title></svg><iframe src=//example.org>",
    "{{ 7*7 }}{% raw %}",
    '=HYPERLINK("http://example.org")',
    "\t-2+3",
    "$\\frac{$^{$",
    "a|b`c`*d*[e](javascript:alert(1))![f](http://example.org/x.png)",
    "[red]rich[/red] [link=http://example.org]x[/link]",
    "\x1b[2J\x1b]0;title\x07\x9b31m",
    "\u202etxt.exe\u2066\u200f\ufeff\u2028\u2029",
    "\0\ufffe\U000e0041",
    "../../../etc/passwd",
    "x" * 10_000,
)
# What no output may hold, wherever it came from.
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def hostile(original, number):
    # The number keeps apart what was apart.
    return f"{PAYLOADS[number % len(PAYLOADS)]}{number}"


def harmless(original, number):
    return f"word{number}"


def report_of(path, replacement):
    """Files of a run in which every text that is no keyword of ours is `replacement(original, number)`."""
    count = iter(range(10_000))

    def text(original):
        return replacement(original, next(count))

    reason = {"status": "error", "reason": "reason"}
    records = [
        *costs(("exact", "a", "b", "c"), (256, 512)),
        *errors(("performer-positive", "d")),
        Record(case=case("time", "other", 256), **reason),
        Record(case=case("memory", "other", 256), **reason),
        Record(case=case("error", "other", 64, of="output"), **reason),
    ]
    texts = {field.name for field in msgspec.structs.fields(Case) if "str" in str(field.type)} | {"reason"}
    texts |= {name for name, field in any_record().fields().items() if field.type == "text"}
    rows = []
    for row in (record.row() for record in records):
        for name in sorted((texts - {"kind", "status", "device"}) & row.keys()):
            # The yardsticks keep their names, so that everything that compares is told.
            if isinstance(row[name], str) and row[name] not in ("exact", "uniform attention"):
                row[name] = text(row[name])
        row["options"] = {text(key): value for key, value in row["options"].items()} | {"text": text("text")}
        rows.append(f"{json.dumps(row)}\n")
    machine = {name: text(name) for name in ("processor", "python", "system", "machine", "utc")}
    machine |= {"packages": {text("torch"): text("2")}, "command": [text("line") for _ in PAYLOADS]}
    run = folder(path / replacement.__name__, [], machine)
    (run / "records.jsonl").write_text("".join(rows), encoding="ascii")
    redraw.report(run, out=run / "out")
    return run / "out"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Folders of everything that is made from the hostile run and from its harmless twin."""
    with pytest.MonkeyPatch.context() as patch:
        # Drawings take longer than everything else.
        patch.setattr("efficient_attn.report.files.draw", lambda plot: [SimpleNamespace(figure=None)])
        patch.setattr("efficient_attn.report.files.to_bytes", lambda figure, kind, *, salt: b"<svg></svg>")
        path = tmp_path_factory.mktemp("runs")
        return report_of(path, hostile), report_of(path, harmless)


def texts_of(outputs, name):
    return [(out / name).read_text(encoding="utf-8") for out in outputs]


def test_the_page_has_the_elements_and_attributes_of_its_harmless_twin(outputs):
    page, twin = map(Page, texts_of(outputs, "report.html"))
    assert Counter(page.elements) == Counter(twin.elements)
    assert not {"script", "iframe", "svg", "b"} & {tag for tag, _ in page.elements}
    # And the text is there for people to read.
    assert "<script>alert(1)</script>" in page.text and "{{ 7*7 }}" in page.text


@pytest.mark.slow
def test_plots_have_no_element_that_their_harmless_twins_lack(tmp_path):
    folders = report_of(tmp_path, hostile), report_of(tmp_path, harmless)
    for name in ("time.svg", "memory.svg", "error.svg"):
        texts = texts_of(folders, name)
        roots = [ElementTree.fromstring(text) for text in texts]
        # A longer name may take two lines, of which each is an element.
        drawing, twin = ({part.tag for part in root.iter()} for root in roots)
        assert drawing == twin and not any("script" in tag for tag in drawing)
        attributes, others = ({name for part in root.iter() for name in part.attrib} for root in roots)
        assert attributes == others
        links = [value for part in roots[0].iter() for key, value in part.items() if key.endswith("href")]
        assert all(link.startswith("#") for link in links) and not UNSEEN.search(texts[0])


def test_no_text_output_moves_a_cursor_or_turns_the_reading_direction(outputs):
    texts = [path for path in outputs[0].iterdir() if path.suffix in (".html", ".csv", ".md")]
    assert len(texts) == 3
    for path in texts:
        assert not UNSEEN.search(path.read_text(encoding="utf-8")), path.name


def test_no_cell_of_a_spreadsheet_is_a_formula_and_numbers_stay_numbers(outputs):
    sheet, twin = (list(csv.reader(io.StringIO(text))) for text in texts_of(outputs, "summary.csv"))
    assert [len(row) for row in sheet] == [len(row) for row in twin]
    number = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")
    cells, twins = ([cell for row in rows for cell in row] for rows in (sheet, twin))
    assert sorted(filter(number.fullmatch, cells)) == sorted(filter(number.fullmatch, twins))
    words = [cell.lstrip() for cell in cells if not number.fullmatch(cell)]
    assert not any(word.startswith(("=", "+", "-", "@", "\t", "\r")) for word in words)
    assert [csv_cell(text) for text in ("@SUM(A1)", " =1+1")] == ["'@SUM(A1)", "' =1+1"]


def test_markdown_has_the_lines_and_cells_of_its_harmless_twin(outputs):
    shapes = []
    for text in texts_of(outputs, "tables.md"):
        shapes.append([len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in text.splitlines()])
        assert not re.search(r"[`<>\[\]]", re.sub(r"\\[!-/:-@\[-`{-~]", "", text))
    assert shapes[0] == shapes[1]
