"""Files around the code: workflows run scripts that exist, and statements of the pages hold."""

import json
import os
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
from made_records import case, folder

import efficient_attn as ea
from efficient_attn.measure.record import Record
from efficient_attn.studies.results import report

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))

# Actions of GitHub itself are pinned by their major version; the one of others by the branch that its
# maintainers recommend.
ACTION = re.compile(r"actions/[a-z-]+@v\d+|pypa/gh-action-pypi-publish@release/v1")


def parsed(path: Path) -> Any:
    yaml = pytest.importorskip("yaml", reason="comes with the extra docs")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in parsed(path)["jobs"].values() for step in job["steps"]]


def commands(path: Path) -> list[str]:
    """Commands of a workflow, read without a parser of YAML."""
    return re.findall(r"^ +(?:- )?run: (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_workflows_are_found() -> None:
    assert [path.stem for path in WORKFLOWS] == ["constraints", "docs", "release", "tests"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_one_script_a_step_with_pinned_actions_and_few_rights(path: Path) -> None:
    workflow = parsed(path)
    assert workflow["permissions"] == {"contents": "read"}
    ran = [step["run"] for step in steps(path) if "run" in step]
    assert ran == commands(path) and all("\n" not in one for one in ran)
    # An expression in a command would be a way to run the text that it becomes.
    assert [one for one in ran if "${{" in one] == []
    assert all(ACTION.fullmatch(step["uses"]) for step in steps(path) if "uses" in step)


def test_the_scripts_and_files_that_workflows_name_exist() -> None:
    ran = [command for path in WORKFLOWS for command in commands(path)]
    named = {name for command in ran for name in re.findall(r"(?<![\w/])\.ci/[\w.-]+", command)}
    named -= {".ci/cell", ".ci/matrix.json"}
    assert named == {".ci/run", ".ci/docs", ".ci/release", ".ci/update-constraints"}
    assert [name for name in sorted(named) if not os.access(ROOT / name, os.X_OK)] == []


def test_every_cell_of_the_matrix_has_what_the_workflow_reads() -> None:
    if not (ROOT / ".ci/matrix.json").exists():
        pytest.skip("there is no matrix of versions yet")
    cells = json.loads((ROOT / ".ci/matrix.json").read_text(encoding="utf-8"))
    read = set(re.findall(r"matrix\.cell\.(\w+)", (ROOT / ".github/workflows/tests.yml").read_text()))
    assert read == {"name", "os", "python"} and cells
    assert [cell for cell in cells if not read <= cell.keys()] == []
    assert len({cell["name"] for cell in cells}) == len(cells) and os.access(ROOT / ".ci/cell", os.X_OK)


def test_a_release_is_tested_before_it_is_published_and_by_a_tag_alone() -> None:
    release = parsed(ROOT / ".github/workflows/release.yml")
    # YAML reads the key `on` as true.
    assert release[True] == {"push": {"tags": ["v*"]}}
    publish = release["jobs"]["publish"]
    assert publish["needs"] == "build" and publish["permissions"] == {"id-token": "write"}
    assert not any("checkout" in str(step) or "run" in step for step in publish["steps"])


def test_the_hosted_site_has_the_configuration_and_extras_of_the_workflow() -> None:
    hosted = parsed(ROOT / ".readthedocs.yaml")
    assert (ROOT / hosted["sphinx"]["configuration"]).is_file() and hosted["sphinx"]["fail_on_warning"]
    (install,) = hosted["build"]["jobs"]["install"]
    for text in (install, (ROOT / ".ci/docs").read_text(encoding="utf-8")):
        assert "-c constraints.txt '.[docs]'" in text


def test_the_extra_of_the_site_has_everything_that_its_pages_import() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    assert "efficient-attn[hf]" in extras["docs"]
    assert "'.[docs]' && sphinx-build -W" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_nothing_advises_to_install_the_distribution_from_an_index() -> None:
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/**/*.ipynb")]
    texts += [*ROOT.glob("efficient_attn/**/*.py"), *ROOT.glob("cli/**/*.py")]
    assert len(texts) > 100
    advice = re.compile(r"pip install[^.\n]*\befficient-attn\b")
    assert [
        path for path in texts if path.name != "CHANGELOG.md" and advice.search(path.read_text("utf-8"))
    ] == []


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_an_issue_asks_for_the_environment(path: Path) -> None:
    assert "efficient-attn env" in path.read_text(encoding="utf-8")
    fields = [one for one in parsed(path)["body"] if one["id"] == "environment"]
    assert len(fields) == 1 and "efficient-attn env" in fields[0]["attributes"]["label"]


def test_reading_records_runs_no_file_that_they_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("open('ran', 'w')\ndef attend(q, k, v): ...\n")
    kinds = {"time": {"times_s": (1e-3,) * 4}, "memory": {"peak_bytes": 64}}
    named = [
        Record(case=case(kind, label, tokens, backend=backend), **measured)
        for kind, measured in kinds.items()
        for tokens in (64, 128)
        for label, backend in (("exact", "exact"), ("attend", "evil.py:attend"))
    ]
    run = folder(tmp_path / "run", named, {"study": "bench"})
    results = ea.read(run)
    (page,) = report(run, html=tmp_path / "page.html")
    assert "attend" in str(results.tables()) and ea.diff(run, run).sentences()
    assert "attend" in page.read_text(encoding="utf-8")
    assert not (tmp_path / "ran").exists()


CONSTRAINTS = runpy.run_path(str(ROOT / ".ci/update-constraints"))


def test_constraints_take_the_newest_versions_without_a_build_and_new_dependencies() -> None:
    before = "# About.\nbeartype==0.1\nJinja2==3.0\ntorch==2.13.0\nunknown==1.0\n"
    versions = {"jinja2": "3.1", "torch": "2.14.0+cpu", "beartype": "0.2", "new": "1.5", "indirect": "9"}
    after = CONSTRAINTS["updated"](before, versions, {"jinja2", "torch", "new"})
    assert after == "# About.\nbeartype==0.2\nJinja2==3.1\nnew==1.5\ntorch==2.14.0\nunknown==1.0\n"


def test_constraints_keep_a_torch_that_has_a_build_for_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    of_cuda = {"torch": "2.15.0", "nvidia-cublas": "13", "rich": "15"}
    assert CONSTRAINTS["for_cpu"](of_cuda) == {"nvidia-cublas": "13", "rich": "15"}
    assert "torch stays" in capsys.readouterr().err
    of_cpu = {"torch": "2.15.0+cpu", "rich": "15"}
    assert CONSTRAINTS["for_cpu"](of_cpu) == of_cpu


def test_constraints_are_asked_for_all_declared_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = CONSTRAINTS["declared"](project)
    assert {
        "torch",
        "jinja2",
        "pytest-xdist",
        "transformers",
    } <= declared and "efficient-attn" not in declared
