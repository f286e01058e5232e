"""The interactive page: values of the records, ratios to exact attention, and use in a browser."""

import json
import re
import sys
from pathlib import Path

import pytest
from browser import chromium, opened
from parsed_pages import Page
from synthetic_records import case, costs, folder

from efficient_attn.errors import MissingPackageError
from efficient_attn.measure.record import Record
from efficient_attn.measure.units import show_seconds
from efficient_attn.runs import results as redraw
from efficient_attn.runs.results import read
from efficient_attn.stats.estimates import call_time

BENCH = Path(__file__).parents[2] / "results" / "epyc-2-cores" / "bench-512-8192"
SKIPPED = Record(case=case("time", "window", 4096), status="skipped", reason="would take <about> 3 s")


def figures_of(text):
    """Data and layout of every chart of a page."""
    decoder, charts = json.JSONDecoder(), []
    for start in re.finditer(r'Plotly\.newPlot\(\s*"chart-[-\d]+",\s*', text):
        data, end = decoder.raw_decode(text, start.end())
        layout, _ = decoder.raw_decode(text, re.compile(r",\s*").match(text, end).end())
        charts.append((data, layout))
    return charts


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """The interactive page of a stored run with times, errors and memory."""
    pytest.importorskip("plotly", reason="the extra [interactive] is missing")
    out = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("efficient_attn.report.files.KINDS", ())
        assert out / "interactive.html" in redraw.report(BENCH, out=out, interactive=True)
    return out / "interactive.html"


def times(*, causal, kind="time"):
    """Times or other records of the stored run by label and length."""
    records = [one for one in read(BENCH).records if (one.case.kind, one.case.causal) == (kind, causal)]
    return {(record.case.label, record.case.tokens): record for record in records}


def test_every_record_is_a_point_with_its_value_interval_and_status(bench):
    charts = figures_of(bench.read_text())
    for causal, figure in ((False, charts[1]), (True, charts[3])):
        lines = {trace["name"]: trace for trace in figure[0] if "name" in trace}
        measured = {place: record for place, record in times(causal=causal).items() if record.status == "ok"}
        assert len(measured) > 4
        for (label, tokens), record in measured.items():
            line = lines[label]
            place = line["x"].index(tokens)
            median, low, high, _ = call_time(record)
            assert line["y"][place] == median
            text = line["hovertext"][place].replace("<br>", " ")
            assert text.startswith(f"{label} sequence length, tokens: {tokens} {show_seconds(median)}")
            assert "measured" in text
            if low is not None and high < 3 * median:
                assert f"({show_seconds(low)} to {show_seconds(high)})" in text


def test_a_backend_has_the_symbol_of_the_static_plots_in_every_chart(bench):
    symbols = {}
    for data, _ in figures_of(bench.read_text()):
        for trace in data:
            if trace.get("marker", {}).get("symbol") and "name" in trace:
                symbols.setdefault(trace["name"], set()).add(trace["marker"]["symbol"])
    assert all(len(names) == 1 for names in symbols.values())
    names = ("exact", "window", "window(global_tokens=4)", "linformer")
    shown = [symbols[name].pop() for name in names]
    assert shown == ["circle", "triangle-up", "triangle-up-open", "diamond"]


def test_relative_values_are_ratios_to_exact_attention_at_the_same_length(bench):
    figure, records = figures_of(bench.read_text())[1], times(causal=False)
    buttons = [button for menu in figure[1]["updatemenus"] for button in menu["buttons"]]
    arguments = {button["label"]: button["args"] for button in buttons}
    (update, _, places), (restored, _, _) = arguments["vs exact"], arguments["absolute"]
    assert len(places) == len(update["y"]) > 7 and not update["error_y.visible"]
    for place, ratios, values in zip(places, update["y"], restored["y"], strict=True):
        line = figure[0][place]
        assert values == line["y"]
        for tokens, ratio in zip(line["x"], ratios, strict=True):
            record = records.get((line["name"], tokens))
            if record is None or not record.times_s:
                assert ratio is None
                continue
            expected = call_time(record).median / call_time(records["exact", tokens]).median
            assert ratio == pytest.approx(expected, rel=1e-12)


def test_the_page_loads_nothing_and_names_stay_text(tmp_path, bench, monkeypatch):
    hostile = "<a href='https://example.org'>x</a></script>"
    monkeypatch.setattr("efficient_attn.report.files.KINDS", ())
    redraw.report(folder(tmp_path / "run", [*costs(("exact", hostile)), SKIPPED]), interactive=True)
    text = (tmp_path / "run" / "interactive.html").read_text()
    assert "would take &lt;about&gt; 3 s" in json.dumps(figures_of(text)[0])
    for html in (bench.read_text(), text):
        page = Page(html)
        assert page.references == [] and not {"link", "iframe", "img", "a"} & dict(page.elements).keys()
        assert "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline';" in html
        traces = [trace for data, _ in figures_of(html) for trace in data]
        assert len(traces) > 3
        assert not any("<a " in text for t in traces for text in (t.get("name", ""), *t["hovertext"]))
    assert "<script" not in (tmp_path / "run" / "report.html").read_text()


def test_without_plotly_the_option_is_refused_in_one_line(tmp_path, monkeypatch):
    run = folder(tmp_path / "run", costs())
    message = "report --interactive needs plotly, which is not installed: pip install plotly."
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(MissingPackageError, match=re.escape(message)):
        redraw.report(run, interactive=True)
    assert not (run / "report.html").exists()


# Middle of an element, after it has been scrolled into view.
MIDDLE = """(() => {{ const element = {}; element.scrollIntoView({{block: 'center'}});
const box = element.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; }})()"""
LEGEND = "[...{}.querySelectorAll('.traces')].find(e => e.textContent === {!r})"
LEGEND += ".querySelector('.legendtoggle')"
PLOT = "document.getElementById('{}')"
POINT = """(() => {{ const plot = {0}; plot.scrollIntoView({{block: 'center'}});
const line = plot._fullData.find(line => line.name === {1!r} && line.yaxis === 'y');
const area = plot.querySelector('.nsewdrag').getBoundingClientRect(), {{xaxis, yaxis}} = plot._fullLayout;
return [area.x + xaxis.d2p(line.x[{2}]), area.y + yaxis.d2p(line.y[{2}])]; }})()"""
PAUSE = "new Promise(resolve => setTimeout(resolve, 700))"


@pytest.mark.slow
@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.skipif(chromium() is None, reason="no chromium on the PATH")
def test_in_a_browser_a_line_is_hidden_and_a_value_is_read(bench, tmp_path, width):
    with opened(bench, width, tmp_path / "profile") as page:
        page.value(PAUSE)
        assert page.value("document.documentElement.scrollWidth <= innerWidth")
        assert page.value("document.querySelectorAll('.main-svg .scatterlayer .trace').length > 20")
        time = PLOT.format("chart-0-1")
        page.click(*page.value(MIDDLE.format(LEGEND.format(time, "linformer"))))
        page.value(PAUSE)
        hidden = f"{time}._fullData.filter(line => line.visible === 'legendonly').map(line => line.name)"
        assert "linformer" in page.value(hidden)
        assert not {"window", "exact"} & set(page.value(hidden))

        x, y = page.value(POINT.format(time, "exact", 3))
        # A pointer that jumps out of nowhere is not over the chart yet.
        page.mouse("mouseMoved", x - 3, y - 3)
        page.mouse("mouseMoved", x, y)
        page.value(PAUSE)
        text = page.value(f"{time}.querySelector('.hoverlayer').textContent")
        median, low, high, _ = call_time(times(causal=False)["exact", 4096])
        assert text.startswith(f"exactsequence length, tokens: 4096{show_seconds(median)}")
        assert f"({show_seconds(low)} to {show_seconds(high)})" in text and text.endswith("measured")
        assert page.value("performance.getEntriesByType('resource').length") == 0 and page.errors == []
