"""Files around the code: packages, dependencies, workflows, pages and the list of mutants."""

import ast
import json
import os
import re
import runpy
import sys
import tomllib
from collections import Counter
from importlib import import_module, metadata
from pathlib import Path

import pytest
from synthetic_records import case, folder

import efficient_attn as ea
from efficient_attn.measure.record import Record

ROOT = Path(__file__).parent.parent
TOML = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = TOML["project"]
FOLDERS = {"efficient_attn": ROOT / "efficient_attn", "efficient_attn_cli": ROOT / "cli"}
IMPORTS = (ast.Import, ast.ImportFrom)
MUTANTS = list(runpy.run_path(str(ROOT / "tests/mutants.py"))["mutants"]())


def text_of(name: str | Path) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def package_files() -> dict[Path, str]:
    """Every file that has to be installed, with the package that it is installed in."""
    return {
        file: ".".join([name, *file.parent.relative_to(top).parts])
        for name, top in FOLDERS.items()
        for file in top.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def requirement_names(requirements: list[str]) -> set[str]:
    names = {re.split(r"[<>=\[; ]", requirement)[0].lower() for requirement in requirements}
    return names - {PROJECT["name"]}


@pytest.fixture
def wheel() -> metadata.Distribution:
    """The installed distribution; no test of the wheel runs where the checkout itself is in use."""
    found = [*metadata.distributions(name="efficient-attn")]
    in_use = [d for d in found if '"editable": true' not in (d.read_text("direct_url.json") or "")]
    if not in_use and "EFFICIENT_ATTN_TEST_WHEEL" not in os.environ:
        pytest.skip("the wheel is not installed, the checkout is in use; continuous integration installs it")
    assert in_use, "EFFICIENT_ATTN_TEST_WHEEL asks for the wheel, which is not installed"
    return in_use[0]


def test_the_wheel_holds_exactly_the_files_of_the_checkout_and_is_tested(
    wheel: metadata.Distribution,
) -> None:
    paths = [str(path) for path in wheel.files or [] if path.parts[0] in FOLDERS and path.suffix != ".pyc"]
    # A file too many was left in build/ by an earlier installation: setuptools packs that folder as it is.
    expected = [f"{package.replace('.', '/')}/{file.name}" for file, package in package_files().items()]
    assert sorted(paths) == sorted(expected)
    assert {f"{package}/py.typed" for package in FOLDERS} <= set(paths)
    for package in FOLDERS:
        assert Path(import_module(package).__file__) == wheel.locate_file(f"{package}/__init__.py")
    assert str(ROOT) not in sys.path


def test_the_sdist_has_every_folder_and_page_of_the_checkout() -> None:
    manifest = set(text_of("MANIFEST.in").split())
    # setuptools adds these, and the sources of the packages.
    automatic = {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py", "cli", "efficient_attn"}
    # Further entries of an unpacked sdist, of a checkout in use and of a copy of tests/mutants.py.
    unshipped = {".git", ".venv", "PKG-INFO", "setup.cfg", "build", "dist", "runs", ".hypothesis"}
    unshipped |= {"efficient_attn_cli"}
    found = {one.name for one in ROOT.iterdir() if not re.search(r"_cache$|^__|egg-info$", one.name)}
    assert sorted(found - manifest - automatic - unshipped) == []


def test_every_direct_dependency_has_a_tested_version() -> None:
    lines = text_of("constraints.txt").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    assert {name.lower() for name in pins} == set().union(*map(requirement_names, groups)) | {
        "setuptools",
        "narwhals",
    }
    # A local version such as 2.13.0+cpu would tie the file to one kind of machine.
    assert re.fullmatch(r"[\d.]+", pins["torch"])


def test_every_package_that_is_imported_is_declared() -> None:
    core = requirement_names(PROJECT["dependencies"])
    extras = PROJECT["optional-dependencies"]
    optional = requirement_names([*extras["hf"], *extras["interactive"]])
    undeclared = {}
    for file in package_files():
        if file.suffix == ".py":
            tree = ast.parse(text_of(file))
            foreign = imported(tree) - sys.stdlib_module_names - FOLDERS.keys() - core
            at_top = imported(ast.Module([node for node in tree.body if isinstance(node, IMPORTS)], []))
            # A folder that is called after an optional package asks for it, in words, in its __init__.
            allowed = (optional - at_top) | (optional & {file.parent.name})
            # Triton comes with PyTorch for CUDA.
            allowed |= {"triton"} if file.parent.name == "cuda" else set()
            if foreign - allowed:
                undeclared[file] = foreign - allowed
    assert undeclared == {}


def imported(tree: ast.AST) -> set[str]:
    names = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    names |= {node.module for node in froms if node.module}
    return {name.split(".")[0] for name in names}


def test_the_command_exists_and_the_changelog_has_the_version_with_its_date() -> None:
    pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")
    module, _, function = PROJECT["scripts"]["efficient-attn"].partition(":")
    assert callable(getattr(import_module(module), function))
    first, *released = re.findall(r"^## \[(.+)\](.*)$", text_of("CHANGELOG.md"), re.MULTILINE)
    assert first == ("Unreleased", "")
    assert all(re.fullmatch(r" - \d{4}-\d\d-\d\d", date) for _, date in released)
    assert ".dev" in PROJECT["version"] or PROJECT["version"] in dict(released)
    # The newest release, also while the next version is in development.
    cited = re.search(r'^version: "(.+)"\ndate-released: "(.+)"$', text_of("CITATION.cff"), re.MULTILINE)
    assert cited and (cited[1], f" - {cited[2]}") == released[0]


def test_the_scripts_and_cells_that_workflows_name_exist() -> None:
    workflows = "".join(map(text_of, sorted((ROOT / ".github/workflows").glob("*.yml"))))
    ran = " ".join(re.findall(r"^ +(?:- )?run: (.+)$", workflows, re.MULTILINE))
    scripts = {".ci/run", ".ci/docs", ".ci/release", ".ci/update-constraints", ".ci/cell"}
    assert set(re.findall(r"(?<![\w/])\.ci/[\w.-]+", ran)) == scripts | {".ci/matrix.json"}
    assert [name for name in sorted(scripts) if not os.access(ROOT / name, os.X_OK)] == []
    cells = json.loads(text_of(".ci/matrix.json"))
    read = set(re.findall(r"matrix\.cell\.(\w+)", workflows))
    assert read == {"name", "os", "python"} and cells
    assert [cell for cell in cells if not read <= cell.keys()] == []
    assert len({cell["name"] for cell in cells}) == len(cells)


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
    assert "attend" in str(results.tables()) and ea.diff(run, run).sentences()
    assert not (tmp_path / "ran").exists()


def test_every_fault_of_the_list_applies_once_to_its_file() -> None:
    assert len([mutant for mutant in MUTANTS if not mutant.equivalent]) >= 120
    assert max(Counter((mutant.file, mutant.old, mutant.new) for mutant in MUTANTS).values()) == 1
    for mutant in MUTANTS:
        text = text_of(mutant.file)
        assert mutant.applied(text) != text


@pytest.mark.slow
def test_every_fault_can_be_compiled() -> None:
    for mutant in MUTANTS:
        if mutant.file.endswith(".py"):
            ast.parse(mutant.applied(text_of(mutant.file)))


def test_the_tests_of_every_fault_exist() -> None:
    words = {word for mutant in MUTANTS for word in mutant.tests.split()}
    for test in {word for word in words if word.startswith("tests/")}:
        file, _, name = test.partition("::")
        assert (ROOT / file).exists(), test
        assert not name or f"def {name.partition('[')[0]}(" in text_of(file), test


def test_the_tests_of_a_file_are_those_of_its_faults_and_of_its_importers() -> None:
    tests = runpy.run_path(str(ROOT / "tests/for.py"))["tests_of"](ROOT / "cli/main.py")
    faults = {mutant.tests for mutant in MUTANTS if mutant.file == "cli/main.py"}
    assert faults and {*tests} >= faults | {"tests/golden/test_outputs.py"}
