"""The pages are true: generated ones are fresh, Python in them runs, commands in them exist."""

import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
# The extra package that a page is about; where it is not installed, nothing on the page can run.
NEEDS = {"hugging-face.md": "transformers", "hugging-face-swapping.md": "transformers"}
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
TOCTREE = re.compile(r"^```{toctree}\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [code for _, written_in, code in found if written_in == language]


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def same_table() -> Iterator[None]:
    """Takes out of the table of backends what a page has registered."""
    from efficient_attn.backends import list_backends
    from efficient_attn.registry import SPECS

    list_backends()
    before = dict(SPECS)
    yield
    SPECS.clear()
    SPECS.update(before)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=page_name)
def test_the_python_on_a_page_runs_from_top_to_bottom(
    page: Path, same_table: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name], reason=f"{NEEDS[page.name]} is not installed")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    for number, code in enumerate(blocks(page, "python"), start=1):
        exec(compile(code, f"{page_name(page)}, block {number}", "exec"), names)


@pytest.mark.parametrize("name", ["backends.md", "reference-quantities.md"])
def test_a_generated_page_is_what_the_tables_say(name: str, tmp_path: Path) -> None:
    # In a process of its own: other tests put backends into the table of this one.
    run = f"runpy.run_path({str(ROOT / 'docs/generate.py')!r})"
    code = f"import runpy; print({run}['PAGES'][{name!r}](), end='')"
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    written = (ROOT / "docs" / name).read_text(encoding="utf-8")
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
    main = pytest.importorskip(
        "efficient_attn_cli.main", reason="needs an installation, if only an editable one"
    )
    from typer.testing import CliRunner

    words = line.split()
    answer = CliRunner().invoke(main.app, [words[1], "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert answer.exit_code == 0, answer.output
    options = [word for word in words if word.startswith("--")]
    assert [option for option in options if option not in answer.output] == []


def test_the_reference_has_every_public_name_with_its_signature() -> None:
    made = runpy.run_path(str(ROOT / "docs/api.py"))["page"]()
    import efficient_attn

    headings = re.findall(r"^### (\S+)$", made, re.MULTILINE)
    public = {f"ea.{name}" for name in efficient_attn.__all__ if name != "testing"}
    public |= {f"testing.{name}" for name in efficient_attn.testing.__all__}
    assert {name for name in headings if not name.startswith("integrations.")} == public
    assert len(headings) == len(set(headings))
    assert "ea.list_backends(*, causal=None)" in made
    assert "integrations.transformers.attach(model, backend=None, *, full=None" in made


def test_the_first_page_leads_to_the_one_that_decides_and_to_all_others() -> None:
    first = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    assert "**[Which backend for me](choosing.md)**" in first
    listed = set(re.findall(r"^([a-z-]+)$", "".join(TOCTREE.findall(first)), re.MULTILINE))
    assert listed == {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"} | {"api"}
