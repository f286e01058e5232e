"""Pages are true: their Python runs, commands and links exist, and the README keeps its word."""

import os
import re
import runpy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from rank_processes import output_of
from synthetic_records import forgotten
from typer.testing import CliRunner

import efficient_attn as ea
from efficient_attn import studies
from efficient_attn.runs import registry
from efficient_attn.testing import check_names
from efficient_attn.tools.diff import names as quantity_names

main = pytest.importorskip("efficient_attn_cli.main", reason="needs an installation")

ROOT = Path(__file__).parent.parent
# Written when the site is built.
GENERATED = {"api", "results"}
DOCS = sorted(page for page in (ROOT / "docs").glob("*.md") if page.stem not in GENERATED)
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "README.md", ROOT / "results/README.md", *DOCS]
# Packages that the Python on a page imports.
NEEDS = {"hugging-face.md": "transformers", "after-training.md": "transformers"}
# Pages whose Python torchrun starts, in tests/distributed/test_ranks.py.
ON_SEVERAL_PROCESSES = {"distributed.md"}
# First line of a block that is a file of the package.
FILE = re.compile(r"# (studies/\w+\.py)\n")
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
TOCTREE = re.compile(r"^```{toctree}\n(.*?)^```", re.MULTILINE | re.DOTALL)
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINES = 100
RECORD = runpy.run_path(str(ROOT / "docs/record.py"))


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
LONG = ("measuring.md", "hugging-face.md", "new-attention.md")


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] * (page.name in LONG)) for page in WITH_PYTHON],
    ids=page_name,
)
def test_the_python_on_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name], reason=f"{NEEDS[page.name]} is not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "studies").mkdir()
    monkeypatch.setattr(studies, "__path__", [*studies.__path__, str(tmp_path / "studies")])
    names: dict[str, object] = {"__name__": "page"}
    with forgotten():
        for number, code in enumerate(blocks(page, "python"), start=1):
            if file := FILE.match(code):
                Path(file[1]).write_text(code, encoding="utf-8")
                registry.studies.cache_clear()
                monkeypatch.setattr(ea, "__all__", [*ea.__all__, Path(file[1]).stem])
                monkeypatch.setattr(ea, "_STUDIES", [*ea._STUDIES, Path(file[1]).stem])
            else:
                exec(compile(code, f"{page_name(page)}, block {number}", "exec"), names)
    registry.studies.cache_clear()


def command_lines() -> Iterator[tuple[str, str]]:
    """Every `efficient-attn …` in a bash block, with the page it stands on."""
    for page in PAGES:
        for line in re.sub(r"\\\n", " ", "\n".join(blocks(page, "bash"))).splitlines():
            if line.strip().startswith("efficient-attn "):
                yield page_name(page), line.strip()


@pytest.mark.parametrize(("page", "line"), [*command_lines()])
def test_the_commands_on_a_page_exist_with_their_options(page: str, line: str) -> None:
    assert_exists(line)


def assert_exists(line: str) -> None:
    """The command of a line, with its options."""
    words = line.split()
    run = partial(CliRunner().invoke, main.app, env={"COLUMNS": "200", "NO_COLOR": "1"})
    rare = run([words[1], "--help-all"])
    answer = run([words[1], "--help"]) if rare.exit_code else rare
    assert answer.exit_code == 0, answer.output
    options = [word for word in words if word.startswith("--")]
    assert [option for option in options if option not in answer.output] == []


def test_the_reference_lists_every_public_name_once() -> None:
    made = runpy.run_path(str(ROOT / "docs/api.py"))["page"]()
    listed = re.findall(r"^\.\. auto(?:class|function):: efficient_attn\.(\S+)$", made, re.MULTILINE)
    modules = ("testing", "intercept", "distributed")
    public = {name for name in ea.__all__ if name not in modules}
    public |= {f"{module}.{name}" for module in modules for name in getattr(ea, module).__all__}
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
    group: Any = typer.main.get_command(main.app)
    options = [option for command in [group, *group.commands.values()] for option in command.params]
    flags = {flag for option in options for flag in (*option.opts, *option.secondary_opts)}
    for example in (ROOT / "docs/examples").glob("**/*.py"):
        flags |= set(re.findall(r'add_argument\("(--[a-z-]+)"', example.read_text(encoding="utf-8")))
    return flags | {"--jobs", "--with-cuda"}


def test_checks_quantities_and_exit_codes_on_pages_exist() -> None:
    faults = (ROOT / "docs/new-attention.md").read_text(encoding="utf-8").split("## Detected faults")[1]
    checks = set(re.findall(r"`(\w+)`", faults))
    assert len(checks) > 20 and checks <= set(check_names(long=True))
    registry.studies()
    limited = set(re.findall(r"\b([a-z_]+):\d+%", (ROOT / "docs/measuring.md").read_text(encoding="utf-8")))
    assert limited and limited <= set(quantity_names())
    package = pytest.importorskip("efficient_attn_cli", reason="needs an installation")
    section = (ROOT / "docs/reference.md").read_text(encoding="utf-8").split("## Exit codes")[1]
    stated = set(re.findall(r"\d+", " ".join(re.findall(r"^\| ([\d, ]+) \|", section, re.MULTILINE))))
    codes = {str(code) for name, code in vars(package).items() if name.isupper()}
    assert len(codes) == 6 and codes <= stated


def test_the_readme_is_a_screen_with_both_commands_and_what_the_first_measured() -> None:
    main_job, tests = re.findall(r"```bash\n(python3 -m venv .*)\n```", README)
    assert main_job.endswith(" && .venv/bin/efficient-attn bench --seq-len 512:8192:x2")
    # Continuous integration runs the second command literally.
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert f"{tests} || failed+=(pytest)" in lines
    assert len(README.splitlines()) <= LINES


@pytest.mark.parametrize("page", RECORD["PAGES"], ids=page_name)
def test_numbers_and_the_terminal_on_a_page_are_those_of_the_table_of_record(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert RECORD["page"](text) == text, "run: python docs/record.py"
    svg = (ROOT / "docs/images/bench-terminal.svg").read_bytes()
    assert RECORD["pictures"]()[".svg"] == svg, "run: python docs/record.py"
    # Letters stay text, and no font comes from elsewhere.
    assert svg.count(b"<text") > 20 and b"@import" not in svg and svg.count(b"http") == 1


QUOTING = [ROOT / "README.md", *(ROOT / f"docs/{name}.md" for name in ("choosing", "speed", "quickstart"))]


@pytest.mark.parametrize("page", QUOTING, ids=page_name)
def test_a_speed_up_or_crossover_on_a_page_is_that_of_the_table_of_record(page: Path) -> None:
    numbers = RECORD["quoted"]()
    text = re.split("## Beside other packages", page.read_text(encoding="utf-8"))[0]
    count = 0
    # A sentence or a cell speaks of one backend.
    for part in re.split(r"[|]|[.:;]\s", text.replace("\n", " ")):
        names = re.findall(r"`([a-z-]+(?:\([a-z_]+=\d+\))?)`", part)
        speeds = re.findall(r"(\d[\d.]*)×|(?:faster from|faster than exact attention above) (\d+)", part)
        for speed in ["".join(groups) for groups in speeds] if len(names) == 1 else ():
            assert speed in numbers[names[0]], part
            count += 1
    assert count or page.name in ("speed.md", "quickstart.md")


def test_each_figure_of_the_readme_is_made_by_the_command_above_it() -> None:
    records = runpy.run_path(str(ROOT / "docs/images.py"))["RECORDS"]
    figures = re.findall(r"^!\[(.*?)\]\(docs/images/(.*?)\.png\)$", README, re.MULTILINE)
    shown = [(caption, picture) for caption, picture in figures if picture in records]
    assert shown
    for caption, picture in shown:
        above = README.partition(f"![{caption}]")[0]
        run = ROOT / "results/epyc-2-cores" / records[picture]
        commands = (run / "command.txt").read_text(encoding="utf-8").splitlines()
        assert commands and all(re.sub(r" --(out|threads) \S+", "", command) in above for command in commands)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site; continuous integration has built it from the same files."""
    if os.environ.get("CI") and (ROOT / "docs/_build/index.html").exists():
        return ROOT / "docs/_build"
    for package in ("sphinx", "myst_parser", "furo", "latex2mathml"):
        pytest.importorskip(package, reason="the docs extra is not installed")
    built = tmp_path_factory.mktemp("site")
    output_of("-m", "sphinx", "-q", "-W", "--keep-going", ROOT / "docs", built)
    return built


@pytest.mark.slow
def test_nothing_that_a_page_of_the_site_loads_has_an_address_elsewhere_and_formulas_are_mathml(
    site: Path,
) -> None:
    kinds = "stylesheet|preload|icon|preconnect"
    elsewhere = re.compile(
        r"<(?:script|img|iframe|source|video)\b[^>]*\bsrc=\"(?:https?:)?//[^\"]*"
        rf'|<link\b(?=[^>]*\brel="(?:{kinds})")[^>]*\bhref="(?:https?:)?//[^"]*'
        r"|url\([\"']?(?:https?:)?//[^)]*\)|@import[^;]*//[^;]*"
    )
    texts = {
        path: path.read_text(encoding="utf-8") for kind in ("html", "css") for path in site.rglob(f"*.{kind}")
    }
    assert texts and {path: hits for path, text in texts.items() if (hits := elsewhere.findall(text))} == {}
    for name in ("backends", "errors", "measuring"):
        page = (site / f"{name}.html").read_text(encoding="utf-8")
        assert "<math " in page and "</math>" in page
        # A renderer that gives up leaves commands of TeX behind.
        assert re.findall(r"\\(?:frac|mathrm|left|operatorname)\b", page) == []
