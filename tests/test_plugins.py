"""Plug-ins: code of another package runs when its backend is asked for, and not before."""

import json
import os
import sys

import pytest

from efficient_attn.backends import list_backends, spec
from efficient_attn.errors import UnknownNameError
from efficient_attn.external import plugins
from efficient_attn.registry import SPECS

GOOD = """
from efficient_attn.backends.exact import ExactOptions, FusedAttention
from efficient_attn.registry import Capabilities, register

open("imported", "w").close()
promises = Capabilities(causal=True, exact=True, time_growth=2)
register("stranger", summary="As exact.", capabilities=promises, options=ExactOptions)(FusedAttention)
"""
TAKEN = """
from efficient_attn.registry import Capabilities, register

register("window", summary="", capabilities=Capabilities(causal=False))(print)
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a package with a plug-in onto the path of this process, and takes all of it away again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    modules, specs = set(sys.modules), dict(SPECS)

    def add(package, name, code):
        (tmp_path / f"{package}.py").write_text(code)
        about = tmp_path / f"{package}-2.5.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 2.5\n")
        (about / "entry_points.txt").write_text(f"[efficient_attn.backends]\n{name} = {package}\n")
        plugins.cache_clear()

    yield add
    plugins.cache_clear()
    SPECS.clear()
    SPECS.update(specs)
    for name in set(sys.modules) - modules:
        if name in ("strangers",):
            del sys.modules[name]


@pytest.fixture
def run(monkeypatch, capsys):
    """Exit code, standard output and standard error of a command."""
    main = pytest.importorskip("efficient_attn_cli.main", reason="needs an installation").main
    monkeypatch.setenv("COLUMNS", "200")

    def command(*words):
        with pytest.raises(SystemExit) as ended:
            main(words)
        return ended.value.code, *capsys.readouterr()

    return command


def test_the_list_tells_which_package_brings_a_plug_in(install, run):
    install("strangers", "stranger", GOOD)
    code, out, _ = run("list")
    assert code == 0 and "stranger: of strangers 2.5, imported on first use." in out
    rows = {row["name"]: row for row in json.loads(run("list", "--json")[1])}
    assert rows["stranger"]["plugin"] == "strangers 2.5" and rows["exact"]["plugin"] is None
    assert rows["stranger"].keys() == rows["exact"].keys() and "stranger" not in list_backends()
    with pytest.raises(UnknownNameError, match="Did you mean 'stranger'"):
        spec("strangre")
    assert not os.path.exists("imported")
    assert spec("stranger").summary == "As exact." and os.path.exists("imported")


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        (TAKEN, "RuntimeError: Two backends are called 'window'"),
    ],
)
def test_a_broken_plug_in_is_one_line_where_it_is_asked_for_and_nothing_elsewhere(
    install, run, contents, message
):
    install("strangers", "stranger", contents)
    code, _, err = run("list")
    assert code == 0 and err == ""
    code, _, err = run("list", "stranger")
    assert code == 2 and "plug-in 'stranger' (strangers 2.5)" in err and message in err
    assert len(err.strip().splitlines()) == 1
