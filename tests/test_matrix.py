"""Versions in which continuous integration runs the tests, and the script that runs one cell of them."""

import json
import re
import runpy
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
CELLS = {one["name"]: one for one in json.loads((ROOT / ".ci/matrix.json").read_text(encoding="utf-8"))}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CLASSIFIED = {one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", one)}


def test_the_oldest_cell_has_the_oldest_versions_that_are_promised() -> None:
    oldest, requirements = CELLS["oldest"], PROJECT["dependencies"] + PROJECT["optional-dependencies"]["hf"]
    bounds = dict(re.findall(r"^(\w+)>=([\d.]+)", "\n".join(requirements), re.MULTILINE))
    assert oldest["torch"].removesuffix(".0") == bounds["torch"]
    assert oldest["numpy"].startswith(f"{bounds['numpy']}.")
    assert oldest["transformers"].startswith(f"{bounds['transformers']}.")
    assert f">={oldest['python']}" == PROJECT["requires-python"]


def test_every_python_and_system_of_the_classifiers_is_a_cell() -> None:
    assert {cell["python"] for cell in CELLS.values()} == CLASSIFIED
    assert {cell["os"].partition("-")[0] for cell in CELLS.values()} == {"ubuntu", "macos"}
    systems = {one.rpartition(" ")[2] for one in PROJECT["classifiers"] if one.startswith("Operating System")}
    assert systems == {"Linux", "MacOS"}


def test_a_cell_replaces_the_versions_of_the_constraints() -> None:
    script = runpy.run_path(str(ROOT / ".ci" / "cell"))
    text = "# Why.\nnumpy==2\npandas==3\nrich==15.0.0\ntokenizers==0.23\ntorch==2.13.0\ntransformers==5.23\n"
    lines = script["constraints"](text, CELLS["oldest"]).splitlines()
    assert lines == ["# Why.", "rich==15.0.0", "torch==2.8.0+cpu", "numpy==1.26.4", "transformers==5.14.1"]
    assert script["torch_of"](CELLS["macos"]) == CELLS["macos"]["torch"]
    assert "torch==2.8.0\n" in script["constraints"](text, CELLS["oldest"], cuda=True)
