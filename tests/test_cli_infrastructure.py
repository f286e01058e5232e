"""The command line as a whole: fast help, strict JSON, quiet ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.main import get_command

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

import efficient_attn as ea
from efficient_attn_cli.main import COMMANDS, app, main

CODE = "from efficient_attn_cli.main import main; main()"


def child(*words, **settings):
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **settings}
    return subprocess.Popen([sys.executable, "-c", CODE, *words], **settings)


@pytest.mark.parametrize(
    ("word", "shown"), [("--help", "bench"), ("--version", f"efficient-attn {version('efficient-attn')}\n")]
)
def test_help_and_version_load_no_torch(word, shown):
    code = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {CODE}"
    run = subprocess.run([sys.executable, "-c", code, word], capture_output=True, text=True, check=True)
    assert shown in run.stdout and run.stdout.splitlines()[-1] == "False"
    assert ea.__version__ == version("efficient-attn")


def test_list_tells_every_backend_its_promises_and_its_paper(capsys):
    from efficient_attn.backends import list_backends

    with pytest.raises(SystemExit, match="0"):
        main(["list", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert tuple(row["name"] for row in rows) == list_backends()
    assert all({"causal", "key_mask", "exact", "options", "paper"} <= set(row) for row in rows)
    with pytest.raises(SystemExit, match="0"):
        main(["list"])
    table = capsys.readouterr().out
    assert all(f" {name} " in table for name in list_backends())


def test_env_tells_the_machine_in_json_and_in_lines(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["env", "--json"])
    assert json.loads(capsys.readouterr().out)["processor"]
    with pytest.raises(SystemExit, match="0"):
        main(["env"])
    assert "torch.version" in capsys.readouterr().out


@pytest.mark.slow
def test_a_real_interruption_keeps_every_finished_record(tmp_path):
    process = child(
        "bench", "--seq-len", "64:2048:x2", "--out", str(tmp_path / "out"), start_new_session=True
    )
    records = tmp_path / "out" / "records.jsonl"
    deadline = time.monotonic() + 60
    while not records.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and out.splitlines()[-1] == str(tmp_path / "out")
    assert all(json.loads(line)["status"] for line in records.read_text().splitlines())


def test_no_command_shows_what_there_is(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "bench" in "".join(capsys.readouterr())


def options_of(capsys, *words):
    """Options in a help text, those of help aside, and its number of lines; 0 options without such a text."""
    with pytest.raises(SystemExit) as ending:
        main(words)
    lines = capsys.readouterr().out.splitlines()
    flags = [line for line in lines if re.match(r"  (-\w, )?--", line) and "--help" not in line]
    return (0 if ending.value.code else len(flags)), len(lines)


def test_eleven_commands_have_few_options_on_one_screen(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert len(COMMANDS) == len(app.registered_commands) == 11
    shown = {name: options_of(capsys, name, "--help") for name in COMMANDS}
    whole = {name: options_of(capsys, name, "--help-all")[0] or shown[name][0] for name in COMMANDS}
    assert {name: pair for name, pair in shown.items() if pair[0] > 16 or pair[1] > 40} == {}
    assert sum(whole.values()) <= 150 and whole["bench"] <= 24, whole


def test_commands_that_messages_name_exist_with_their_flags():
    commands = get_command(app).commands
    flags = {flag for command in commands.values() for one in command.params for flag in one.opts}
    for path in Path(ea.__file__).parent.glob("[ims]*/*.py"):
        text = path.read_text(encoding="utf-8")
        assert {*re.findall(r"(?:with |\()(--[a-z-]+)", text)} <= flags, path
        assert {*re.findall(r"efficient-attn ([a-z]+) (?:[A-Z-])", text)} <= {*commands}, path
