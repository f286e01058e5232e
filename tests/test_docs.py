"""The pages are true: generated ones are fresh, Python in them runs, commands in them exist."""

import re
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
# Written when the site is built.
GENERATED = {"api", "results"}
DOCS = sorted(page for page in (ROOT / "docs").glob("*.md") if page.stem not in GENERATED)
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "README.md", *DOCS]
# The extra package that a page is about; where it is not installed, nothing on the page can run.
NEEDS = {"hugging-face.md": "transformers"}
# Pages whose Python torchrun starts, in tests/distributed/test_ranks.py.
ON_SEVERAL_PROCESSES = {"distributed.md"}
# First line of a block that is a file of the package.
FILE = re.compile(r"# (studies/\w+\.py)\n")
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
TOCTREE = re.compile(r"^```{toctree}\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [code for _, written_in, code in found if written_in == language]


def files(page: Path) -> dict[str, str]:
    """Files that a page adds to the package, by path."""
    return {found[1]: code for code in blocks(page, "python") if (found := FILE.match(code))}


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


WITH_PYTHON = [page for page in PAGES if blocks(page, "python") and page.name not in ON_SEVERAL_PROCESSES]
WITH_FILES = [page for page in WITH_PYTHON if files(page)]


@pytest.mark.parametrize("page", [page for page in WITH_PYTHON if page not in WITH_FILES], ids=page_name)
def test_the_python_on_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name], reason=f"{NEEDS[page.name]} is not installed")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    for number, code in enumerate(blocks(page, "python"), start=1):
        exec(compile(code, f"{page_name(page)}, block {number}", "exec"), names)


# Runs blocks one after the other where studies have more files.
RUN = """
import sys
import efficient_attn.studies
efficient_attn.studies.__path__.append("studies")
names = {"__name__": "page"}
for number, code in enumerate(sys.stdin.read().split("\\0"), start=1):
    exec(compile(code, f"block {number}", "exec"), names)
"""


@pytest.mark.parametrize("page", WITH_FILES, ids=page_name)
def test_the_python_on_a_page_that_adds_files_runs_with_them(page: Path, tmp_path: Path) -> None:
    for path, code in files(page).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(code, encoding="utf-8")
    code = "\0".join(code for code in blocks(page, "python") if not FILE.match(code))
    run = [sys.executable, "-c", RUN]
    child = subprocess.run(run, input=code, capture_output=True, text=True, cwd=tmp_path)
    assert child.returncode == 0, child.stderr


def test_the_page_of_backends_is_what_the_table_of_backends_says(tmp_path: Path) -> None:
    # In a process of its own: other tests put backends into the table of this one.
    code = f"import runpy; print(runpy.run_path({str(ROOT / 'docs/generate.py')!r})['page'](), end='')"
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    written = (ROOT / "docs/backends.md").read_text(encoding="utf-8")
    assert written == child.stdout, "run: python docs/generate.py"


def command_lines() -> list[tuple[str, str]]:
    """Every `efficient-attn …` in a bash block, with the page it stands on."""
    pages = [*PAGES, ROOT / "results/README.md"]
    lines = [
        (page_name(page), line.strip())
        for page in pages
        for code in blocks(page, "bash")
        for line in re.sub(r"\\\n", " ", code).splitlines()
    ]
    return [(page, line) for page, line in lines if line.startswith("efficient-attn ")]


@pytest.mark.parametrize(("page", "line"), command_lines())
def test_the_commands_on_a_page_exist_with_their_options(page: str, line: str) -> None:
    assert_exists(line)


def assert_exists(line: str) -> None:
    """The command of a line, with its options."""
    main = pytest.importorskip(
        "efficient_attn_cli.main", reason="needs an installation, if only an editable one"
    )
    from typer.testing import CliRunner

    words = line.split()
    run = partial(CliRunner().invoke, main.app, env={"COLUMNS": "200", "NO_COLOR": "1"})
    rare = run([words[1], "--help-all"])
    answer = run([words[1], "--help"]) if rare.exit_code else rare
    assert answer.exit_code == 0, answer.output
    options = [word for word in words if word.startswith("--")]
    assert [option for option in options if option not in answer.output] == []


def test_the_reference_lists_every_public_name_once() -> None:
    made = runpy.run_path(str(ROOT / "docs/api.py"))["page"]()
    import efficient_attn

    listed = re.findall(r"^\.\. auto(?:class|function):: efficient_attn\.(\S+)$", made, re.MULTILINE)
    modules = ("testing", "intercept", "distributed")
    public = {name for name in efficient_attn.__all__ if name not in modules}
    public |= {f"{module}.{name}" for module in modules for name in getattr(efficient_attn, module).__all__}
    assert {name for name in listed if not name.startswith("integrations.")} == public
    assert len(listed) == len(set(listed))
    assert "integrations.transformers.attach" in listed


READERS = (
    "I have a model and long inputs.",
    "I have a new attention.",
    "I read the papers.",
    "I guard a CI.",
)


@pytest.mark.parametrize("reader", READERS)
def test_the_first_page_leads_each_reader_to_a_command_and_a_page(reader: str) -> None:
    first = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    (entry,) = re.findall(rf"^- \*\*{re.escape(reader)}\*\* (.*?)(?=^- |^$)", first, re.MULTILINE | re.DOTALL)
    assert_exists(entry.split("`")[1])
    links = re.findall(r"\]\((\S+?)\)", entry)
    assert links and all((ROOT / "docs" / link).exists() for link in links)


def test_the_first_page_leads_to_all_others() -> None:
    first = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^([a-z-]+)$", "".join(TOCTREE.findall(first)), re.MULTILINE)
    assert sorted(listed) == sorted({page.stem for page in DOCS} - {"index"} | GENERATED)


@pytest.mark.parametrize("page", DOCS, ids=page_name)
def test_links_of_a_page_lead_to_files_and_headings_that_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if target.stem in GENERATED:
            continue
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def anchors(page: Path) -> set[str]:
    """Headings of a page as links spell them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_checks_on_a_page_exist() -> None:
    from efficient_attn.testing import check_names

    page = (ROOT / "docs/new-attention.md").read_text(encoding="utf-8")
    faults = page.split("## Detected faults")[1]
    named = set(re.findall(r"`(\w+)`", faults))
    assert len(named) > 20 and named <= set(check_names(long=True))


# Flags of other programs.
FOREIGN = {"--jobs", "--with-cuda"}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_flags_in_the_text_of_a_page_exist(page: Path) -> None:
    main = pytest.importorskip("efficient_attn_cli.main", reason="needs an installation")
    import typer

    group: Any = typer.main.get_command(main.app)
    parameters = [one for command in group.commands.values() for one in command.params]
    known = {flag for one in [*parameters, *group.params] for flag in (*one.opts, *one.secondary_opts)}
    for example in (ROOT / "docs/examples").glob("**/*.py"):
        known |= set(re.findall(r'add_argument\("(--[a-z-]+)"', example.read_text(encoding="utf-8")))
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    named = {
        flag
        for code in re.findall(r"`([^`\n]+)`", text)
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", code)
    }
    assert named - known - FOREIGN == set()


def test_the_names_of_fail_on_are_known() -> None:
    from efficient_attn.stats.diff import names
    from efficient_attn.studies import studies

    studies()
    text = (ROOT / "docs/measuring.md").read_text(encoding="utf-8")
    limited = set(re.findall(r"\b([a-z_]+):\d+%", text))
    assert limited and limited <= set(names())


def test_the_exit_codes_of_the_reference_are_those_of_the_commands() -> None:
    exits = pytest.importorskip("efficient_attn_cli.exits", reason="needs an installation")
    section = (ROOT / "docs/reference.md").read_text(encoding="utf-8").split("## Exit codes")[1]
    stated = set(re.findall(r"\d+", " ".join(re.findall(r"^\| ([\d, ]+) \|", section, re.MULTILINE))))
    assert {str(code) for name, code in vars(exits).items() if name.isupper()} <= stated
