"""The notebooks of docs/notebooks: their cells run, and their stored outputs are those of their cells."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MADE = runpy.run_path(str(ROOT / "docs/notebooks.py"))
NAMES = MADE["names"]()

# Runs code cells in one namespace, and draws the value of a last expression as a notebook would.
RUN = """
import ast, json, sys

names = {"__name__": "__main__"}
for number, code in enumerate(json.load(sys.stdin), start=1):
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, f"cell {number}", "exec"), names)
    value = last and eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
    for form in ("_repr_html_", "_repr_png_"):
        # Figures of matplotlib have an HTML form that may be None.
        if drawn := getattr(value, form, lambda: None)():
            print(number, form, len(drawn), file=sys.stderr)
"""


def outputs(name: str) -> list[list[dict]]:
    """The stored outputs of each code cell."""
    return [cell["outputs"] for cell in MADE["read"](name)["cells"] if cell["cell_type"] == "code"]


def kinds(name: str) -> set[str]:
    return {kind for cell in outputs(name) for output in cell for kind in output.get("data", {})}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_cells_of_a_notebook_run_from_top_to_bottom(name: str, tmp_path: Path) -> None:
    cells = json.dumps(MADE["code"](MADE["read"](name)))
    run = [sys.executable, "-c", RUN]
    child = subprocess.run(run, input=cells, capture_output=True, text=True, cwd=tmp_path)
    assert child.returncode == 0, child.stderr
    drawn = {
        line.split()[1] for line in child.stderr.splitlines() if re.fullmatch(r"\d+ _repr_\w+_ \d+", line)
    }
    assert drawn == {"_repr_html_", "_repr_png_"}


@pytest.mark.parametrize("name", NAMES)
def test_the_outputs_of_a_notebook_are_those_of_its_cells(name: str) -> None:
    notebook = MADE["read"](name)
    assert notebook["metadata"][MADE["DIGEST"]] == MADE["digest"](notebook), (
        f"run: python docs/notebooks.py {name}"
    )
    counts = [cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert "error" not in {output["output_type"] for cell in outputs(name) for output in cell}


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_shows_tables_figures_and_a_progress_bar_and_is_small(name: str) -> None:
    assert {"text/html", "image/png"} <= kinds(name)
    text = (ROOT / f"docs/notebooks/{name}.ipynb").read_text(encoding="utf-8")
    assert "<progress" in text and "<table" in text
    assert len(text) < 500_000


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_the_machine_of_a_run_is_stored(name: str) -> None:
    text = json.dumps(outputs(name))
    assert re.findall(r"/(?:tmp|home|root|usr)/[\w./-]*", text) == []


@pytest.mark.parametrize("name", NAMES)
def test_links_of_a_notebook_lead_to_files_and_the_first_page_leads_to_it(name: str) -> None:
    cells = [
        MADE["text"](cell["source"])
        for cell in MADE["read"](name)["cells"]
        if cell["cell_type"] == "markdown"
    ]
    links = [
        link for cell in cells for link in re.findall(r"\]\(([^)\s#]+)[^)\s]*\)", cell) if "://" not in link
    ]
    assert links and [link for link in links if not (ROOT / "docs/notebooks" / link).exists()] == []
    assert f"\nnotebooks/{name}\n" in (ROOT / "docs/index.md").read_text(encoding="utf-8")


def test_a_page_of_the_site_has_the_cells_and_the_richest_form_of_every_output() -> None:
    def output(**data: str) -> dict:
        return {
            "output_type": "display_data",
            "data": {kind.replace("_", "/"): text for kind, text in data.items()},
        }

    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {
            "cell_type": "code",
            "source": "value = 1\nvalue",
            "outputs": [
                {"output_type": "stream", "name": "stdout", "text": ["printed\n"]},
                output(text_plain="plain", text_html="<table></table>"),
                output(text_plain="plain", image_png="AAAA\n"),
                output(text_plain="alone"),
            ],
        },
    ]
    page = MADE["page"](json.dumps({"cells": cells}))
    parts = ["# Title\ntext", "value = 1\nvalue", "printed", "<table></table>", "base64,AAAA", "alone"]
    assert [page.count(part) for part in parts] == [1] * len(parts)
    assert sorted(parts, key=page.index) == parts and "plain" not in page
