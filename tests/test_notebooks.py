"""Notebooks show tables for measurements; those of docs/notebooks are fresh."""

import ast
import json
import re
import runpy
from pathlib import Path

import pytest

import efficient_attn as ea
from efficient_attn.report.table import Table

ROOT = Path(__file__).parent.parent
MADE = runpy.run_path(str(ROOT / "docs/notebooks.py"))
NAMES = MADE["names"]()


def test_measurements_are_escaped_tables_and_figures_draw_themselves_in_a_notebook() -> None:
    maps = ea.show(["window"], tokens="0:4")
    assert maps._repr_html_().startswith("<table>") and "<td>window</td>" in maps._repr_html_()
    png = maps.plot()._repr_png_()
    assert png.startswith(b"\x89PNG") and len(png) < 100_000
    table = Table("<b>", ("name",), (("<script>",),), ("&",))._repr_html_()
    assert "<script>" not in table and "&lt;script&gt;" in table and "<b>" not in table


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_cells_of_a_notebook_run_from_top_to_bottom(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hasty: None
) -> None:
    monkeypatch.chdir(tmp_path)
    names, drawn = {"__name__": "__main__"}, set()
    for number, code in enumerate(MADE["code"](MADE["read"](name)), start=1):
        tree = ast.parse(code)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"cell {number}", "exec"), names)
        value = last and eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
        # Figures of matplotlib have an HTML form that may be None.
        drawn |= {form for form in ("_repr_html_", "_repr_png_") if getattr(value, form, lambda: None)()}
    assert drawn == {"_repr_html_", "_repr_png_"}


@pytest.mark.parametrize("name", NAMES)
def test_the_outputs_of_a_notebook_are_those_of_its_cells_and_nothing_of_the_machine(name: str) -> None:
    notebook = MADE["read"](name)
    assert notebook["metadata"][MADE["DIGEST"]] == MADE["digest"](notebook), (
        f"run: python docs/notebooks.py {name}"
    )
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert "error" not in {output["output_type"] for output in outputs}
    assert {"text/html", "image/png"} <= {kind for output in outputs for kind in output.get("data", {})}
    assert re.findall(r"/(?:tmp|home|root|usr)/[\w./-]*", json.dumps(outputs)) == []
    text = (ROOT / f"docs/notebooks/{name}.ipynb").read_text(encoding="utf-8")
    assert "<table" in text and len(text) < 500_000


@pytest.mark.parametrize("name", NAMES)
def test_links_of_a_notebook_lead_to_files_and_the_first_page_leads_to_it(name: str) -> None:
    cells = [cell for cell in MADE["read"](name)["cells"] if cell["cell_type"] == "markdown"]
    text = "\n".join(MADE["text"](cell["source"]) for cell in cells)
    links = [link for link in re.findall(r"\]\(([^)\s#]+)[^)\s]*\)", text) if "://" not in link]
    assert links and [link for link in links if not (ROOT / "docs/notebooks" / link).exists()] == []
    assert f"\nnotebooks/{name}\n" in (ROOT / "docs/index.md").read_text(encoding="utf-8")
