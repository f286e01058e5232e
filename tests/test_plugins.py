"""Plug-ins: code of another package runs when its backend is asked for, and not before."""

import subprocess
import sys

COMMANDS = """
from efficient_attn.backends import list_backends, spec
from efficient_attn.errors import UnknownNameError
from efficient_attn_cli.options import _backends

assert "stranger" in _backends("") and "stranger" not in list_backends()
try:
    spec("strangre")
except UnknownNameError as error:
    assert "stranger" in str(error)
from efficient_attn_cli.main import main
try:
    main(["list", "--json"])
except SystemExit as leaving:
    assert leaving.code == 0
assert not os.path.exists("imported")
assert spec("stranger").summary == "Of another package."
assert os.path.exists("imported")
"""
PLUGIN = """
from efficient_attn.registry import Capabilities, register

open("imported", "w").close()


@register("stranger", summary="Of another package.", capabilities=Capabilities(causal=False))
def build(problem, options):
    raise NotImplementedError
"""


def test_a_plug_in_is_listed_completed_and_suggested_without_being_imported(tmp_path):
    (tmp_path / "stranger.py").write_text(PLUGIN)
    about = tmp_path / "stranger-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[efficient_attn.backends]\nstranger = stranger\n")
    code = f"import os, sys\nsys.path.insert(0, {str(tmp_path)!r})\n{COMMANDS}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
