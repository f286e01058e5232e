"""Plug-ins: code of another package runs when its backend is asked for, and not before."""

import json
import os
import sys

import pytest

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from command_line import command
from synthetic_records import forgotten

from efficient_attn.backends import list_backends, spec
from efficient_attn.errors import UnknownNameError
from efficient_attn.external import plugins

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
    """Puts the package `strangers` with a plug-in onto the path, and takes all of it away again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")

    def add(code):
        (tmp_path / "strangers.py").write_text(code)
        about = tmp_path / "strangers-2.5.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: strangers\nVersion: 2.5\n")
        (about / "entry_points.txt").write_text("[efficient_attn.backends]\nstranger = strangers\n")
        plugins.cache_clear()

    with forgotten():
        yield add
    plugins.cache_clear()
    sys.modules.pop("strangers", None)


def test_the_list_tells_which_package_brings_a_plug_in(install):
    install(GOOD)
    code, out, _ = command("list")
    assert code == 0 and "stranger: of strangers 2.5, imported on first use." in out
    rows = {row["name"]: row for row in json.loads(command("list", "--json")[1])}
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
def test_a_broken_plug_in_is_one_line_where_it_is_asked_for_and_nothing_elsewhere(install, contents, message):
    install(contents)
    code, _, err = command("list")
    assert code == 0 and err == ""
    code, _, err = command("list", "stranger")
    assert code == 2 and "plug-in 'stranger' (strangers 2.5)" in err and message in err
    assert len(err.strip().splitlines()) == 1
