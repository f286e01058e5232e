"""Files of others cannot hang or end a command: every import of one, and the first call, ends in a line."""

import os

import pytest

from efficient_attn.errors import DataError, UnknownNameError
from efficient_attn.measure import process
from efficient_attn.measure.process import Process
from efficient_attn.measure.variants import select

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from efficient_attn_cli.main import main

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="isolation needs process groups"),
    pytest.mark.usefixtures("misbehaving"),
]

FILES = {
    "hangs": ("while True: pass", "took longer than 5 s"),
    "crashes": ("import ctypes\nctypes.string_at(0)", "the process crashed with signal 11 (SIGSEGV)"),
    "exits": ("import os\nos._exit(7)", "the process ended with exit code 7"),
    "leaves": ("import sys\nsys.exit()", "leaves.py cannot be imported: SystemExit."),
    "interrupted": ("raise KeyboardInterrupt", "interrupted.py cannot be imported: KeyboardInterrupt."),
}
SMALL = ("--num-heads", "2", "--head-dim", "8")
COMMANDS = {
    "bench": ("--seq-len", "16", *SMALL),
    "mse": ("--inputs", "gaussian", "--seq-len", "16"),
    "show": (),
    "recall": ("--steps", "1", "--seeds", "1"),
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "LIMIT_S", 5.0)
    for name, (text, _) in FILES.items():
        (tmp_path / f"{name}.py").write_text(f"{text}\n")


def refusal(capfd, *words):
    """The line on which a command ends that was refused."""
    with pytest.raises(SystemExit) as exit_:
        main(list(words))
    out, err = capfd.readouterr()
    assert exit_.value.code == 2 and out == "", (out, err)
    return err.splitlines()[-1]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "crashes")) for name in FILES]
)
def test_an_import_that_does_not_end_well_is_a_line_that_names_the_file(name, files, capfd):
    line = refusal(capfd, "check", f"{name}.py:attend", "--timeout", "5s")
    assert line.startswith(f"error: {name}.py cannot be ") and FILES[name][1] in line


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_is_ended_by_an_import(command, name, files, capfd):
    line = refusal(capfd, command, *COMMANDS[command], "--backend", f"{name}.py:attend")
    assert line.startswith(f"error: {name}.py cannot be ") and FILES[name][1] in line


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"bench"}))
@pytest.mark.parametrize("name", ["segfaults", "endless", "endless_building"])
def test_a_study_in_this_process_is_not_ended_by_a_first_call(name, command, files, capfd):
    line = refusal(capfd, command, *COMMANDS[command], "--backend", f"own.py:{name}")
    assert line.startswith("error: own.py cannot be used: ") and "its import or a first call" in line


def test_what_a_first_call_raises_is_left_to_the_study(files):
    (variant,) = select(["own.py:wordy"])
    assert variant.label == "own.py:wordy"


@pytest.mark.slow
def test_what_was_proved_is_not_proved_again_until_its_file_changes(files, monkeypatch, tmp_path):
    asked = []
    ask = Process.ask
    monkeypatch.setattr(Process, "ask", lambda *args, **named: asked.append(args[2]) or ask(*args, **named))
    for _ in range(2):
        select(["own.py:values"], rehearse=False)
    assert [request["target"] for request in asked] == ["own.py:values"]
    os.utime(tmp_path / "own.py", ns=(1, 1))
    select(["own.py:values", "window"], rehearse=False)
    assert len(asked) == 2


def test_what_does_not_exist_is_said_as_before(files):
    with pytest.raises(UnknownNameError, match=r"No object in own\.py is called 'nothing'"):
        select(["own.py:nothing"])
    with pytest.raises(DataError, match=r"There is no file 'none\.py'"):
        select(["none.py:nothing"])
