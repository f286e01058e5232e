"""Files of others cannot hang or end the command `check`: every import of one ends in a line."""

import os

import pytest

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from efficient_attn_cli.main import main

pytestmark = pytest.mark.skipif(os.name != "posix", reason="isolation needs process groups")

FILES = {
    "hangs": ("while True: pass", "took longer than 5 s"),
    "crashes": ("import ctypes\nctypes.string_at(0)", "the process crashed with signal 11 (SIGSEGV)"),
    "exits": ("import os\nos._exit(7)", "the process ended with exit code 7"),
    "leaves": ("import sys\nsys.exit()", "leaves.py cannot be imported: SystemExit."),
    "interrupted": ("raise KeyboardInterrupt", "interrupted.py cannot be imported: KeyboardInterrupt."),
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, (text, _) in FILES.items():
        (tmp_path / f"{name}.py").write_text(f"{text}\n")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "crashes")) for name in FILES]
)
def test_an_import_that_does_not_end_well_is_a_line_that_names_the_file(name, files, capfd):
    with pytest.raises(SystemExit) as exit_:
        main(["check", f"{name}.py:attend", "--timeout", "5s"])
    out, err = capfd.readouterr()
    assert exit_.value.code == 2 and out == "", (out, err)
    line = err.splitlines()[-1]
    assert line.startswith(f"error: {name}.py cannot be ") and FILES[name][1] in line
