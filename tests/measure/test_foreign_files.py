"""Files of others cannot hang or end a command: every import of one, and the first call, ends in a line."""

import os

import pytest

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
# `bench` makes its first call in the process that measures.
COMMANDS = {
    "bench --seq-len 16 --num-heads 2 --head-dim 8": ("exits.py:attend", FILES["exits"][1]),
    "mse --inputs gaussian --seq-len 16": ("own.py:segfaults", "its import or a first call"),
    "show": ("own.py:endless_building", "its import or a first call"),
    "recall --steps 1 --seeds 1": ("own.py:segfaults", "its import or a first call"),
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "LIMIT_S", 5.0)
    for name, (text, _) in FILES.items():
        (tmp_path / f"{name}.py").write_text(f"{text}\n")


def ends_with_line(capfd, said, *words):
    """Whether a command is refused on a line that names the file."""
    with pytest.raises(SystemExit) as exit_:
        main(list(words))
    out, err = capfd.readouterr()
    assert exit_.value.code == 2 and out == "", (out, err)
    (file,) = (word.partition(":")[0] for word in words if ".py:" in word)
    line = err.splitlines()[-1]
    assert line.startswith(f"error: {file} cannot be ") and said in line


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "crashes")) for name in FILES]
)
def test_an_import_that_does_not_end_well_is_a_line_that_names_the_file(name, files, capfd):
    ends_with_line(capfd, FILES[name][1], "check", f"{name}.py:attend", "--timeout", "5s")


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_is_ended_by_an_import_or_by_a_first_call_in_its_process(command, files, capfd):
    backend, said = COMMANDS[command]
    ends_with_line(capfd, said, *command.split(), "--backend", backend)


def test_what_a_first_call_raises_is_left_to_the_study(files):
    (variant,) = select(["own.py:wordy"])
    assert variant.label == "own.py:wordy"


@pytest.mark.slow
def test_what_was_proved_is_not_proved_again_until_its_file_changes(files, monkeypatch, tmp_path):
    requests, ask = [], Process.ask
    monkeypatch.setattr(
        Process, "ask", lambda *args, **named: requests.append(args[2]) or ask(*args, **named)
    )
    for _ in range(2):
        select(["own.py:values"], rehearse=False)
    assert [request["target"] for request in requests] == ["own.py:values"]
    os.utime(tmp_path / "own.py", ns=(1, 1))
    select(["own.py:values", "window"], rehearse=False)
    assert len(requests) == 2
