"""How Sphinx builds the site; every warning is an error there (`sphinx-build -W docs docs/_build`)."""

import runpy
import tomllib
from pathlib import Path
from typing import Any

_PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]

project = _PROJECT["name"]
author = "the efficient-attn developers"
release = _PROJECT["version"]

extensions = ["myst_parser", "sphinx.ext.mathjax"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "formulas"]

html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = False
html_show_copyright = False


def setup(app: Any) -> None:
    """The reference of what is public is written anew from the sources, every time."""
    runpy.run_path(str(Path(__file__).parent / "api.py"), run_name="__main__")
