"""No command makes a connection: in its own process and in every process it starts, sockets are refused."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")
pytestmark = pytest.mark.slow

# Python imports this module at its start. The hook sees every socket of the process, whoever makes it; the
# log lists attempts that somebody may have forgiven.
REFUSE = """
import os, sys

REFUSED = {"socket.__new__", "socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname"}

def log(text):
    with open(os.environ["LOG"], "a") as file:
        file.write(f"{text}\\n")

def refuse(event, arguments):
    if event in REFUSED:
        log(f"{event} {sys.argv}")
        raise OSError(f"There is no network: {event}.")

sys.addaudithook(refuse)
log("hooked")
"""
RUN = """
import json, sys
from efficient_attn_cli.main import main
codes = []
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as leaving:
        codes.append(leaving.code)
print("codes", json.dumps(codes), file=sys.stderr)
"""
SMALL = ("--num-heads", "2", "--head-dim", "8", "--threads", "1", "--rounds", "1")
WINDOW = ("--backend", "window")
COMMANDS = [
    ("list",),
    ("env",),
    ("check", "mine.py:attend", "--only", "order_of_keys_does_not_matter"),
    ("bench", "--seq-len", "16", *SMALL, "--backend", "exact,window,mine.py:attend", "--out", "bench"),
    ("diff", "bench", "bench"),
    ("bench", "--seq-len", "16", *SMALL, "--backward", "--of", "block,encoder", *WINDOW),
    ("bench", "--inputs", "encoder", "--seq-len", "64", "--rounds", "1", *WINDOW),
    ("mse", "--inputs", "gaussian,encoder", "--seq-len", "64", "--size", "4", *WINDOW, "--out", "mse"),
    ("show", *WINDOW),
    ("recall", "--steps", "1", "--seeds", "1", "--size", "8", *WINDOW),
    ("report", "bench", "mse", "--out", "both"),
]


def offline(commands, folder):
    """The exit codes of commands where every socket is refused, and how many processes were hooked."""
    path, log = folder / "hook", folder / "log"
    path.mkdir()
    (path / "sitecustomize.py").write_text(REFUSE)
    (folder / "mine.py").write_text("def attend(q, k, v):\n    return (q @ k.mT).softmax(dim=-1) @ v\n")
    settings = {**os.environ, "PYTHONPATH": str(path), "LOG": str(log)}
    command = [sys.executable, "-c", RUN, json.dumps(commands)]
    run = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True)
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("codes "), run.stderr
    lines = log.read_text().splitlines()
    assert {*lines} == {"hooked"}
    return json.loads(last.removeprefix("codes ")), len(lines)


def test_no_command_and_no_process_that_it_starts_makes_a_socket(tmp_path):
    codes, processes = offline(COMMANDS, tmp_path)
    assert codes == [0] * len(COMMANDS)
    # That of the commands, that of the checks, and at least one that measures.
    assert processes > 2


def test_the_hook_refuses_a_socket_and_says_so(tmp_path):
    (tmp_path / "network.py").write_text("import socket\nsocket.create_connection(('localhost', 1))\n")
    with pytest.raises(AssertionError, match="socket"):
        offline([("check", "network.py:attend")], tmp_path)
