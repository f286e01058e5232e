"""Packages of the wheel: every folder of the library, and `cli` under a name that no other project has.

The description is the README with the addresses of its files in the repository, which an index can follow.
Everything else is in pyproject.toml, which can declare neither.
"""

import re
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def absolute(text: str) -> str:
    """Markdown with absolute links to the files of this version, and of the branch before its release."""
    tag = "main" if ".dev" in PROJECT["version"] else f"v{PROJECT['version']}"
    links = re.sub(r"(?<=\]\()(?=[\w.])(?![a-z]+:)", f"{PROJECT['urls']['Repository']}/blob/{tag}/", text)
    return re.sub(r"(!\[[^\]]*\]\([^)]*)/blob/", r"\1/raw/", links)


setup(
    packages=[*find_packages(include=["efficient_attn", "efficient_attn.*"]), "efficient_attn_cli"],
    package_dir={"efficient_attn_cli": "cli"},
    long_description=absolute((ROOT / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
