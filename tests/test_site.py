"""The built site: formulas, styles and fonts need no network, and other projects can link into the API."""

import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("sphinx", "myst_parser", "furo", "latex2mathml"):
        pytest.importorskip(package, reason="the docs extra is not installed")
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(ROOT / "docs"), str(built)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return built


def test_nothing_that_a_page_loads_has_an_address_elsewhere(site: Path) -> None:
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


def test_formulas_are_mathml(site: Path) -> None:
    for name in ("backends", "errors", "measuring"):
        page = (site / f"{name}.html").read_text(encoding="utf-8")
        assert "<math " in page and "</math>" in page
        # A renderer that gives up leaves commands of TeX behind.
        assert re.findall(r"\\(?:frac|mathrm|left|operatorname)\b", page) == []


def test_every_public_name_can_be_linked_to(site: Path) -> None:
    import efficient_attn

    head, _, packed = (site / "objects.inv").read_bytes().partition(b"zlib.\n")
    assert b"efficient-attn" in head
    names = {line.split()[0] for line in zlib.decompress(packed).decode().splitlines()}
    modules = ("testing", "intercept", "distributed")
    public = {f"efficient_attn.{name}" for name in efficient_attn.__all__ if name not in modules}
    public |= {f"efficient_attn.intercept.{name}" for name in efficient_attn.intercept.__all__}
    assert public <= names
    assert "efficient_attn.Backend.extend" in names


def test_the_example_of_a_report_is_on_the_site(site: Path) -> None:
    assert (site / "report.html").exists()
    assert 'href="report.html"' in (site / "measuring.html").read_text(encoding="utf-8")
