"""Runs the notebooks of docs/notebooks, stores their outputs, and turns them into pages of the site.

`python docs/notebooks.py` runs all of them, `python docs/notebooks.py NAME…` the named ones. Running
needs the extra `notebooks`. A digest of the cells is stored with the outputs, so that a test finds a
notebook that was changed and not run.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "notebooks"
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
DIGEST = "cells_of_outputs"
# Seconds of one cell.
_TIMEOUT_S = 300


def names() -> list[str]:
    """All notebooks."""
    return sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name: str) -> dict[str, Any]:
    """The notebook as a JSON object of nbformat 4."""
    notebook: dict[str, Any] = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    return notebook


def text(lines: str | list[str]) -> str:
    """A text of nbformat, which is one string or a list of lines."""
    return "".join(lines)


def code(notebook: dict[str, Any]) -> list[str]:
    """The code cells."""
    return [text(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def digest(notebook: dict[str, Any]) -> str:
    """Digest of the code cells."""
    return hashlib.sha256("\0".join(code(notebook)).encode()).hexdigest()


def page(source: str) -> str:
    """Markdown of a notebook, with its stored outputs."""
    parts: list[str] = []
    for cell in json.loads(source)["cells"]:
        if cell["cell_type"] == "markdown":
            parts.append(text(cell["source"]))
        else:
            parts.append(_fenced("python", text(cell["source"])))
            parts += [part for output in cell["outputs"] for part in _shown(output)]
    return "\n\n".join(parts) + "\n"


def _shown(output: dict[str, Any]) -> Iterator[str]:
    """Markdown of one output, in the richest form that it has."""
    data = output.get("data", {})
    if "text" in output:
        yield _fenced("text", text(output["text"]))
    elif "text/html" in data:
        yield _fenced("{raw} html", f'<div class="notebook-output">{text(data["text/html"])}</div>')
    elif "image/png" in data:
        picture = text(data["image/png"]).replace("\n", "")
        yield _fenced(
            "{raw} html", f'<img alt="Figure of the cell above" src="data:image/png;base64,{picture}">'
        )
    elif "text/plain" in data:
        yield _fenced("text", text(data["text/plain"]))


def _fenced(kind: str, content: str) -> str:
    return f"````{kind}\n{content.rstrip()}\n````"


def run(name: str) -> None:
    """Run the notebook in an empty folder and store its outputs."""
    import tempfile

    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            notebook,
            resources={"metadata": {"path": folder}},
            kernel_name=KERNEL["name"],
            timeout=_TIMEOUT_S,
            record_timing=False,
            coalesce_streams=True,
        ).execute()
    notebook.metadata = {"kernelspec": KERNEL, DIGEST: digest(notebook)}
    nbformat.write(notebook, FOLDER / f"{name}.ipynb")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or names():
        run(chosen)
