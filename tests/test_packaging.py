"""What is installed: all packages, all data files, nothing undeclared, and that the tests test it."""

import ast
import fnmatch
import json
import os
import re
import sys
import tomllib
from importlib import import_module, metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]
IMPORTS = (ast.Import, ast.ImportFrom)
FOLDERS = {"efficient_attn": ROOT / "efficient_attn", "efficient_attn_cli": ROOT / "cli"}


def packages() -> dict[str, Path]:
    """Every folder with sources or data in it, by the name of the package it is installed as."""
    found = {}
    for name, top in FOLDERS.items():
        for file in top.rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                found[".".join([name, *file.parent.relative_to(top).parts])] = file.parent
    return found


def files() -> set[str]:
    """Every file that has to be installed, by its path in site-packages."""
    return {
        f"{package.replace('.', '/')}/{file.name}"
        for package, folder in packages().items()
        for file in folder.iterdir()
        if file.is_file()
    }


def requirement_names(requirements: list[str]) -> set[str]:
    names = {re.split(r"[<>=\[; ]", requirement)[0].lower() for requirement in requirements}
    return names - {PROJECT["project"]["name"]}


def is_editable(distribution: metadata.Distribution) -> bool:
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    return origin.get("dir_info", {}).get("editable", False)


@pytest.fixture
def wheel() -> metadata.Distribution:
    """The installed distribution; no test of the wheel runs where the checkout itself is in use."""
    in_use = [d for d in metadata.distributions(name="efficient-attn") if not is_editable(d)]
    if not in_use and "EFFICIENT_ATTN_TEST_WHEEL" not in os.environ:
        pytest.skip("the wheel is not installed, the checkout is in use; continuous integration installs it")
    assert in_use, "EFFICIENT_ATTN_TEST_WHEEL asks for the wheel, which is not installed"
    return in_use[0]


def test_every_data_file_is_named_as_package_data() -> None:
    patterns = SETUPTOOLS["package-data"]
    left_out = [
        f"{package}: {file.name}"
        for package, folder in packages().items()
        for file in folder.iterdir()
        if file.is_file() and file.suffix != ".py"
        if not any(fnmatch.fnmatch(file.name, pattern) for pattern in patterns.get(package, []))
    ]
    assert left_out == []


def test_the_wheel_holds_exactly_the_files_of_the_checkout(wheel: metadata.Distribution) -> None:
    paths = [file for file in wheel.files or [] if file.parts[0] in FOLDERS and file.suffix != ".pyc"]
    # A file too many was left in build/ by an earlier installation: setuptools packs that folder as it is.
    assert sorted(map(str, paths)) == sorted(files())


def test_the_tests_test_the_wheel_and_not_the_checkout(wheel: metadata.Distribution) -> None:
    for package in FOLDERS:
        assert Path(import_module(package).__file__) == wheel.locate_file(f"{package}/__init__.py")
    assert str(ROOT) not in sys.path


def test_links_of_the_description_work_away_from_the_repository(wheel: metadata.Distribution) -> None:
    description = wheel.metadata["Description"] or str(wheel.metadata.get_payload())
    links = re.findall(r"\]\(([^)]+)\)", description)
    assert len(links) > 20 and [link for link in links if not link.startswith("https://")] == []
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", description)
    assert pictures and all("/raw/" in picture for picture in pictures)


def test_the_sdist_has_every_folder_and_page_of_the_checkout() -> None:
    manifest = set((ROOT / "MANIFEST.in").read_text(encoding="utf-8").split())
    # setuptools adds these, and the sources of the packages.
    automatic = {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py", "cli", "efficient_attn"}
    # Further entries of an unpacked sdist and of a checkout in use.
    unshipped = {".git", ".venv", "PKG-INFO", "setup.cfg", "build", "dist", "runs", ".hypothesis"}
    found = {one.name for one in ROOT.iterdir() if not re.search(r"_cache$|^__|egg-info$", one.name)}
    assert sorted(found - manifest - automatic - unshipped) == []


def test_shipped_activations_and_texts_stay_small() -> None:
    data = FOLDERS["efficient_attn"] / "data"
    assert sum(one.stat().st_size for one in data.iterdir() if one.is_file()) < 20e6


@pytest.mark.parametrize("folder", FOLDERS.values(), ids=FOLDERS)
def test_the_package_tells_type_checkers_that_it_is_typed(folder: Path) -> None:
    assert (folder / "py.typed").is_file()


def test_every_direct_dependency_has_a_tested_version() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    groups = [PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"].values()]
    assert {name.lower() for name in pins} == set().union(*map(requirement_names, groups)) | {"setuptools"}
    # A local version such as 2.13.0+cpu would tie the file to one kind of machine.
    assert re.fullmatch(r"[\d.]+", pins["torch"])


def test_pages_and_comments_know_the_oldest_torch() -> None:
    (floor,) = re.findall(r"torch>=(\S+)", " ".join(PROJECT["project"]["dependencies"]))
    pages = ("README.md", "CONTRIBUTING.md", "docs/index.md")
    assert [page for page in pages if f"torch {floor} or later" not in _text(ROOT / page)] == []
    # A comment about a torch that is no longer supported explains code that can go.
    sources = [file for top in FOLDERS.values() for file in top.rglob("*.py")]
    named = {version for file in sources for version in re.findall(r"\btorch (\d+\.\d+)", _text(file))}
    assert [version for version in named if _numbers(version) < _numbers(floor)] == []


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def test_every_package_that_is_imported_is_declared() -> None:
    core = requirement_names(PROJECT["project"]["dependencies"])
    optional = requirement_names(PROJECT["project"]["optional-dependencies"]["hf"])
    undeclared = {}
    for folder in packages().values():
        for file in folder.glob("*.py"):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            foreign = _imported(tree) - sys.stdlib_module_names - FOLDERS.keys() - core
            at_top = _imported(ast.Module([n for n in tree.body if isinstance(n, IMPORTS)], []))
            # IPython is there wherever a notebook runs.
            # A folder that is called after an optional package asks for it, in words, in its __init__.
            allowed = (optional - at_top) | (optional & {folder.name}) | ({"IPython"} - at_top)
            if foreign - allowed:
                undeclared[str(file.relative_to(ROOT))] = sorted(foreign - allowed)
    assert undeclared == {}


def _imported(tree: ast.AST) -> set[str]:
    names = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    names |= {node.module for node in froms if node.module}
    return {name.split(".")[0] for name in names}


def test_the_command_is_a_function_that_exists() -> None:
    pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")
    module, _, function = PROJECT["project"]["scripts"]["efficient-attn"].partition(":")
    assert callable(getattr(import_module(module), function))


def test_the_changelog_begins_with_what_comes_next_and_has_the_version_with_its_date() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first, *released = re.findall(r"^## \[(.+)\](.*)$", text, re.MULTILINE)
    assert first == ("Unreleased", "")
    assert all(re.fullmatch(r" - \d{4}-\d\d-\d\d", date) for _, date in released)
    version = PROJECT["project"]["version"]
    assert ".dev" in version or version in dict(released)
