"""The size of each folder and the names that it binds stay within tests/size_budget.toml."""

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUDGET = tomllib.loads((ROOT / "tests" / "size_budget.toml").read_text())
PACKAGES = ("efficient_attn", "cli")


def files_of(folder: str) -> list[Path]:
    return [*ROOT.glob(folder)] if "*" in folder else [*(ROOT / folder).rglob("*.py")]


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Names of variables, arguments, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name


@pytest.mark.parametrize("folder", BUDGET["lines"])
def test_a_folder_has_no_more_lines_than_its_budget(folder: str) -> None:
    lines = sum(len(path.read_text().splitlines()) for path in files_of(folder))
    budget = BUDGET["lines"][folder]["most"]
    assert lines <= budget
    # A row that is far above its folder holds nothing.
    assert lines > budget - 400, f"{folder} has {lines} lines: lower its row"


def test_every_folder_of_the_packages_has_a_budget() -> None:
    folders = {
        f"efficient_attn/{path.name}"
        for path in (ROOT / "efficient_attn").iterdir()
        if any(path.glob("*.py"))
    }
    assert folders - {"efficient_attn/data"} <= set(BUDGET["lines"]) and "cli" in BUDGET["lines"]


def test_names_are_nouns_of_the_field() -> None:
    counts: Counter[str] = Counter()
    for package in PACKAGES:
        for path in files_of(package):
            parts = path.relative_to(ROOT).parts
            folder = "/".join(parts[:2]) if len(parts) > 2 else parts[0]
            words = [
                name for name in bound_names(ast.parse(path.read_text())) if name in BUDGET["names"]["words"]
            ]
            counts[folder] += len(words)
    assert dict(+counts) == BUDGET["names"]["most"], "lower a row after renaming; none is raised"
