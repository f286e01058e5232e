"""Lines, names, pages and words stay within tests/size_budget.toml."""

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


# Written when the site is built.
BUILT = {"api.md", "results.md"}


def pages_of(pattern: str) -> list[Path]:
    return [page for page in ROOT.glob(pattern) if page.name not in BUILT]


def word_count(page: Path) -> int:
    """Words of a page; tables of a page that a script writes are left out."""
    text = page.read_text(encoding="utf-8")
    written = "<!-- Written by" in text[:500]
    return sum(len(line.split()) for line in text.splitlines() if not (written and line.startswith("|")))


def test_the_docs_have_no_more_pages_than_their_budget() -> None:
    assert len(pages_of("docs/*.md")) <= BUDGET["docs"]["pages"]


@pytest.mark.parametrize("pattern", BUDGET["docs"]["words"])
def test_pages_have_no_more_words_than_their_budget(pattern: str) -> None:
    words = {page.name: word_count(page) for page in pages_of(pattern)}
    assert words and sum(words.values()) <= BUDGET["docs"]["words"][pattern], words
