"""Pages are true: their Python runs, commands and links exist, and the README keeps its word."""

import os
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
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "README.md", ROOT / "results/README.md", *DOCS]
# The extra package that a page is about; where it is not installed, nothing on the page can run.
NEEDS = {"hugging-face.md": "transformers"}
# Pages whose Python torchrun starts, in tests/distributed/test_ranks.py.
ON_SEVERAL_PROCESSES = {"distributed.md"}
# First line of a block that is a file of the package.
FILE = re.compile(r"# (studies/\w+\.py)\n")
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
TOCTREE = re.compile(r"^```{toctree}\n(.*?)^```", re.MULTILINE | re.DOTALL)
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINES = 66


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [code for _, written_in, code in found if written_in == language]


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


WITH_PYTHON = [page for page in PAGES if blocks(page, "python") and page.name not in ON_SEVERAL_PROCESSES]
WITH_FILES = [page for page in WITH_PYTHON if any(map(FILE.match, blocks(page, "python")))]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (page.name in ("measuring.md", "hugging-face.md")))
        for page in WITH_PYTHON
        if page not in WITH_FILES
    ],
    ids=page_name,
)
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


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_FILES, ids=page_name)
def test_the_python_on_a_page_that_adds_files_runs_with_them(page: Path, tmp_path: Path) -> None:
    parts = []
    for code in blocks(page, "python"):
        if file := FILE.match(code):
            path = tmp_path / file[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code, encoding="utf-8")
        else:
            parts.append(code)
    run = [sys.executable, "-c", RUN]
    child = subprocess.run(run, input="\0".join(parts), capture_output=True, text=True, cwd=tmp_path)
    assert child.returncode == 0, child.stderr


def command_lines() -> list[tuple[str, str]]:
    """Every `efficient-attn …` in a bash block, with the page it stands on."""
    lines = [
        (page_name(page), line.strip())
        for page in PAGES
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


def test_the_first_page_leads_each_reader_to_a_command_and_a_page_and_to_all_pages() -> None:
    first = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    for reader in ("have a model and long inputs", "have a new attention", "read the papers", "guard a CI"):
        (entry,) = re.findall(rf"^- \*\*I {reader}\.\*\* (.*?)(?=^- |^$)", first, re.MULTILINE | re.DOTALL)
        assert_exists(entry.split("`")[1])
        links = re.findall(r"\]\((\S+?)\)", entry)
        assert links and all((ROOT / "docs" / link).exists() for link in links)
    listed = re.findall(r"^([a-z-]+)$", "".join(TOCTREE.findall(first)), re.MULTILINE)
    assert sorted(listed) == sorted({page.stem for page in DOCS} - {"index"} | GENERATED)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_and_flags_of_a_page_exist(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if "://" not in link and target.stem not in GENERATED:
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
    codes = re.findall(r"`([^`\n]+)`", prose(page))
    flags = {flag for code in codes for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", code)}
    assert flags - known_flags() == set()


def anchors(page: Path) -> set[str]:
    """Headings of a page as links spell them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def known_flags() -> set[str]:
    """Flags of all commands, of the examples and of other programs."""
    main = pytest.importorskip("efficient_attn_cli.main", reason="needs an installation")
    import typer

    group: Any = typer.main.get_command(main.app)
    options = [option for command in [group, *group.commands.values()] for option in command.params]
    flags = {flag for option in options for flag in (*option.opts, *option.secondary_opts)}
    for example in (ROOT / "docs/examples").glob("**/*.py"):
        flags |= set(re.findall(r'add_argument\("(--[a-z-]+)"', example.read_text(encoding="utf-8")))
    return flags | {"--jobs", "--with-cuda"}


def test_checks_quantities_and_exit_codes_on_pages_exist() -> None:
    from efficient_attn.stats.diff import names
    from efficient_attn.studies import studies
    from efficient_attn.testing import check_names

    faults = (ROOT / "docs/new-attention.md").read_text(encoding="utf-8").split("## Detected faults")[1]
    checks = set(re.findall(r"`(\w+)`", faults))
    assert len(checks) > 20 and checks <= set(check_names(long=True))
    studies()
    limited = set(re.findall(r"\b([a-z_]+):\d+%", (ROOT / "docs/measuring.md").read_text(encoding="utf-8")))
    assert limited and limited <= set(names())
    package = pytest.importorskip("efficient_attn_cli", reason="needs an installation")
    section = (ROOT / "docs/reference.md").read_text(encoding="utf-8").split("## Exit codes")[1]
    stated = set(re.findall(r"\d+", " ".join(re.findall(r"^\| ([\d, ]+) \|", section, re.MULTILINE))))
    codes = {str(code) for name, code in vars(package).items() if name.isupper()}
    assert len(codes) == 6 and codes <= stated


def test_the_readme_is_a_screen_with_both_commands_and_what_the_first_measured() -> None:
    main_job, tests = re.findall(r"```bash\n(python3 -m venv .*)\n```", README)
    assert main_job.endswith(" && .venv/bin/efficient-attn advise")
    # Continuous integration runs the second command literally.
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert f"{tests} || failed+=(pytest)" in lines
    assert len(README.splitlines()) <= LINES
    page = runpy.run_path(str(ROOT / "docs/readme.py"))["page"]
    assert page(README) == README, "run: python docs/readme.py"


def test_each_figure_of_the_readme_is_made_by_the_command_above_it() -> None:
    records = runpy.run_path(str(ROOT / "docs/images.py"))["RECORDS"]
    figures = re.findall(r"^!\[(.*?)\]\(docs/images/(.*?)\.png\)$", README, re.MULTILINE)
    shown = [(caption, picture) for caption, picture in figures if picture in records]
    assert shown
    for caption, picture in shown:
        above = README.partition(f"![{caption}]")[0]
        run = ROOT / "results/epyc-2-cores" / records[picture]
        commands = (run / "command.txt").read_text(encoding="utf-8").splitlines()
        assert commands and all(re.sub(r" --out \S+$", "", command) in above for command in commands)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site; continuous integration has built it from the same files."""
    if os.environ.get("CI") and (ROOT / "docs/_build/index.html").exists():
        return ROOT / "docs/_build"
    for package in ("sphinx", "myst_parser", "furo", "latex2mathml"):
        pytest.importorskip(package, reason="the docs extra is not installed")
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(ROOT / "docs"), str(built)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return built


@pytest.mark.slow
def test_nothing_that_a_page_of_the_site_loads_has_an_address_elsewhere_and_formulas_are_mathml(
    site: Path,
) -> None:
    loads = re.compile(r"<(?:script|img|iframe|source|video)\b[^>]*\bsrc=\"(?:https?:)?//[^\"]*")
    kinds = "stylesheet|preload|icon|preconnect"
    sheets = re.compile(rf'<link\b(?=[^>]*\brel="(?:{kinds})")[^>]*\bhref="(?:https?:)?//[^"]*')
    styles = re.compile(r"url\([\"']?(?:https?:)?//[^)]*\)|@import[^;]*//[^;]*")
    found = [
        (path.relative_to(site).as_posix(), hit)
        for kind, patterns in (("html", (loads, sheets, styles)), ("css", (loads, styles)))
        for path in site.rglob(f"*.{kind}")
        for pattern in patterns
        for hit in pattern.findall(path.read_text(encoding="utf-8"))
    ]
    assert found == []
    for name in ("backends", "errors", "measuring"):
        page = (site / f"{name}.html").read_text(encoding="utf-8")
        assert "<math " in page and "</math>" in page
        # A renderer that gives up leaves commands of TeX behind.
        assert re.findall(r"\\(?:frac|mathrm|left|operatorname)\b", page) == []
