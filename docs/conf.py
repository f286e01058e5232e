"""Configuration of Sphinx. Every warning is an error: `sphinx-build -W docs docs/_build`."""

import runpy
import sys
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
sys.path.insert(0, str(HERE))

project = _PROJECT["name"]
author = "the efficient-attn developers"
release = _PROJECT["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "mathml", "reference"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
# Notebooks become Markdown before they are parsed.
source_suffix = {".md": "markdown", ".ipynb": "markdown"}
exclude_patterns = ["_build", "formulas"]

# Types are in the sources; a signature shows names and defaults.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "undoc-members": False}
napoleon_use_rtype = False
napoleon_use_ivar = True
# A name in backquotes is a link where it is public, and code elsewhere.
default_role = "py:obj"

html_theme = "furo"
html_title = f"{project} {release}"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["site.css"]
# A page that `bench` wrote, as an example of a report.
html_extra_path = ["../results/epyc-2-cores/bench-512-8192/report.html"]
html_copy_source = False
html_show_copyright = False


def _escape(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text with code in backquotes: formulas in them are no markup."""
    lines[:] = _api["escaped"](lines)


def _link(app: Any, name: str, source: list[str]) -> None:
    """Notebooks become Markdown, and links to files of results lead to the page of tables."""
    if name.startswith("notebooks/"):
        source[:] = map(_notebooks["page"], source)
    source[:] = map(_results["linked"], source)


_api = runpy.run_path(str(HERE / "api.py"))
_notebooks = runpy.run_path(str(HERE / "notebooks.py"))
_results = runpy.run_path(str(HERE / "results.py"))


def setup(app: Any) -> None:
    """The list of public names and the page of tables are written anew, every time."""
    for script in (_api, _results):
        script["PAGE"].write_text(script["page"](), encoding="utf-8")
    app.connect("source-read", _link)
    # Before napoleon, which makes markup of sections.
    app.connect("autodoc-process-docstring", _escape, priority=100)
