"""Notebooks show one bar for a run and tables for its measurements."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import efficient_attn as ea
from efficient_attn.report.table import Table
from efficient_attn.studies.progress import Progress, notebook_bar


@pytest.fixture
def drawings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, dict[str, str]]]:
    """(number of the display, its content) of everything that a notebook is asked to draw."""
    drawn: list[tuple[int, dict[str, str]]] = []

    class Handle:
        def __init__(self, number: int) -> None:
            self.number = number

        def update(self, content: dict[str, str], *, raw: bool) -> None:
            assert raw
            drawn.append((self.number, content))

    def display(content: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        handle = Handle(len({number for number, _ in drawn}))
        handle.update(content, raw=raw)
        return handle

    ipython, shown = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())
    ipython.display, shown.display = shown, display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    return drawn


def measure(**options):
    return ea.mse(
        ["performer-positive"], of="kernel", sizes=(4, 8), norms=(0.5,), angles=(90,), draws=2, **options
    )


def test_a_run_in_a_notebook_has_one_bar_that_ends_full(drawings) -> None:
    measure()
    assert [number for number, _ in drawings] == [0, 0]
    assert [content["text/plain"][:5] for _, content in drawings] == ["[1/2]", "[2/2]"]
    assert '<progress value="2" max="2">' in drawings[-1][1]["text/html"]


def test_every_run_in_a_notebook_has_a_bar_of_its_own(drawings) -> None:
    measure()
    measure()
    assert [number for number, _ in drawings] == [0, 0, 1, 1]


def test_a_function_of_the_caller_takes_the_place_of_the_bar(drawings) -> None:
    steps: list[Progress] = []
    measure(progress=steps.append)
    assert [step.done for step in steps] == [1, 2] and drawings == []


def test_names_of_other_code_are_text_in_the_bar(drawings) -> None:
    show = notebook_bar()
    assert show is not None
    show(Progress(done=1, total=2, remaining_s=65.0, outcome="<script>\x1b[2J", record=None))
    ((_, content),) = drawings
    assert "<script>" not in content["text/html"] and "\x1b" not in str(content)
    assert content["text/plain"].endswith("1:05 left")


@pytest.mark.parametrize("shell", [None, SimpleNamespace()], ids=["plain Python", "IPython in a terminal"])
def test_there_is_no_bar_outside_of_notebooks(drawings, shell) -> None:
    sys.modules["IPython"].get_ipython = lambda: shell
    assert notebook_bar() is None


def test_measured_sites_are_a_table_in_a_notebook() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()
    with torch.no_grad(), ea.intercept.measure(layer, {"window": {"window": 3}}) as measured:
        layer(torch.ones(1, 6, 8))
    html = measured._repr_html_()
    assert "self_attn" in html and "relative_error_window" in html


def test_weights_maps_are_a_table_of_their_errors_in_a_notebook() -> None:
    html = ea.show(["window"], tokens="0:4")._repr_html_()
    assert html.startswith("<table>") and "<td>window</td>" in html


def test_a_table_is_escaped_in_a_notebook() -> None:
    html = Table("<b>", ("name",), (("<script>",),), ("&",))._repr_html_()
    assert "<script>" not in html and "&lt;script&gt;" in html and "<b>" not in html


def test_a_figure_draws_itself_in_a_notebook() -> None:
    png = ea.show(["window"], tokens="0:4").plot()._repr_png_()
    assert png.startswith(b"\x89PNG") and len(png) < 100_000
