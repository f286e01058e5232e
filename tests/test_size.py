"""Lines, names and words stay within tests/size_budget.toml, and prose is standard technical English."""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUDGET = tomllib.loads((ROOT / "tests" / "size_budget.toml").read_text())
# Written when the site is built.
BUILT = {"api.md", "results.md"}

# Words that mark clauses without a noun at their head, and their highest counts per 1 000 words. Limits only
# fall: the aim is 1 for "what" and 0.2 for the others.
WORDS = {
    "what": re.compile(r"\bwhat\b", re.IGNORECASE),
    "told": re.compile(r"\b(?:told|tells?|said|says?)\b", re.IGNORECASE),
    "beside": re.compile(r"\bbeside\b", re.IGNORECASE),
    "those": re.compile(r"\bthose\b", re.IGNORECASE),
    "so many": re.compile(r"\bso many\b", re.IGNORECASE),
    "Of": re.compile(r"(?:^|[.:;!?|]\s+)Of\b", re.MULTILINE),
}
LIMITS = {
    "docstrings": {"what": 0.7, "told": 0.2, "beside": 0.2, "those": 0.2, "so many": 0.2, "Of": 0.3},
    "messages": {"what": 1.2, "told": 0.9, "beside": 0.2, "those": 0.5, "so many": 0.3, "Of": 0.4},
    "docs": {"what": 0.2, "told": 0.2, "beside": 0.2, "those": 0.2, "so many": 0.2, "Of": 0.2},
}
# Functions that backends and studies define, each its own.
INTERFACE = {"build", "operations", "tables", "sentences", "plots", "files"}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2", re.MULTILINE | re.DOTALL)
NO_PROSE = re.compile(r"<!--.*?-->|`[^`\n]*`|\]\([^)\s]*\)|https?://\S+", re.DOTALL)
WORD = re.compile(r"[^\W\d_][\w’'-]*")


def files_of(folder: str) -> list[Path]:
    return [*ROOT.glob(folder)] if "*" in folder else [*(ROOT / folder).rglob("*.py")]


def sources() -> list[Path]:
    return [*files_of("efficient_attn"), *files_of("cli")]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


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
    folders = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("efficient_attn/*/*.py")}
    assert {*folders, "cli"} - {"efficient_attn/data"} <= set(BUDGET["lines"])


def test_names_are_nouns_of_the_field() -> None:
    counts: Counter[str] = Counter()
    for path in [*sources(), *files_of("docs")]:
        parts = path.relative_to(ROOT).parts
        folder = "/".join(parts[:2]) if len(parts) > 2 else parts[0]
        names = bound_names(parsed(path))
        counts[folder] += sum(name in BUDGET["names"]["words"] for name in names)
    assert dict(+counts) == BUDGET["names"]["most"], "lower a row after renaming; none is raised"


def test_a_class_name_has_one_meaning_and_a_function_name_at_most_two() -> None:
    classes: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for path in sources():
        names = [node for node in parsed(path).body if not getattr(node, "name", "_").startswith("_")]
        classes.update(node.name for node in names if isinstance(node, ast.ClassDef))
        functions.update(node.name for node in names if isinstance(node, ast.FunctionDef))
    assert [name for name, count in classes.items() if count > 1] == []
    assert [name for name, count in functions.items() if count > 2 and name not in INTERFACE] == []


def pages_of(pattern: str) -> list[Path]:
    return [page for page in ROOT.glob(pattern) if page.name not in BUILT]


def word_count(page: Path) -> int:
    """Words of a page; tables of a page that a script writes are left out."""
    text = page.read_text(encoding="utf-8")
    written = "<!-- Written by" in text[:500]
    return sum(len(line.split()) for line in text.splitlines() if not (written and line.startswith("|")))


@pytest.mark.parametrize("pattern", BUDGET["docs"]["words"])
def test_pages_have_no_more_words_than_their_budget(pattern: str) -> None:
    words = {page.name: word_count(page) for page in pages_of(pattern)}
    assert words and sum(words.values()) <= BUDGET["docs"]["words"][pattern], words
    assert len(pages_of("docs/*.md")) <= BUDGET["docs"]["pages"]


def strings() -> Iterator[tuple[str, str]]:
    """Docstrings and messages of the sources, each with its group; a message has two words or more."""
    for path in sources():
        nodes = [*ast.walk(parsed(path))]
        firsts = [node.body[0] for node in nodes if isinstance(node, DOCUMENTED) and node.body]
        documentation = [first.value for first in firsts if isinstance(first, ast.Expr)]
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if node in documentation:
                    yield "docstrings", node.value
                elif len(WORD.findall(node.value)) > 1:
                    yield "messages", node.value


def docs() -> Iterator[tuple[str, str]]:
    """Pages written by hand, without code, output and addresses."""
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))):
        page = path.read_text(encoding="utf-8")
        if path.name not in BUILT and "<!-- Written by" not in page[:500]:
            yield "docs", NO_PROSE.sub(" ", FENCE.sub("", page))


def test_prose_keeps_within_the_limits_of_tell_tale_words() -> None:
    texts = [*strings(), *docs()]
    for group, limits in LIMITS.items():
        text = "\n".join(text for name, text in texts if name == group)
        words = len(WORD.findall(text))
        assert words > 500
        rates = {name: 1000 * len(WORDS[name].findall(text)) / words for name in limits}
        assert {name: rate for name, rate in rates.items() if rate > limits[name]} == {}, group


def test_first_paragraphs_of_public_docstrings_have_no_semicolon() -> None:
    for path in sources():
        nodes = [node for node in ast.walk(parsed(path)) if isinstance(node, DOCUMENTED)]
        public = [node for node in nodes if not getattr(node, "name", "").startswith("_")]
        firsts = [(ast.get_docstring(node) or "").partition("\n\n")[0] for node in public]
        assert [first for first in firsts if ";" in first] == [], path
