"""What is written where nobody can draw: narrow, colourless, dumb and closed terminals."""

import os
import subprocess
import sys

import pytest
from terminals import on_a_terminal

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")
pytest.importorskip("pty", reason="there are no pseudo-terminals here")

CODE = """
from efficient_attn.studies.loop import Step
from efficient_attn_cli import console

outcome = "a-backend(of=a, long=name), 65536 tokens, time: ok"
console.show_step(Step(done=1, total=2, remaining_s=45.0, outcome=outcome, record=None))
"""
COMMAND = "from efficient_attn_cli.main import main; main()"


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"TERM": ""}], ids=str)
def test_a_terminal_that_cannot_draw_gets_plain_lines(variables):
    written = on_a_terminal(CODE, **variables)
    assert written == "[1/2] a-backend(of=a, long=name), 65536 tokens, time: ok; 0:45 left\r\n"
    refused = on_a_terminal(COMMAND, "bench", "--seq-len", "many", **variables)
    assert refused.startswith("error: --seq-len") and "\x1b" not in refused


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_leaves_early_ends_the_command_quietly(stream):
    words = {"stdout": ["list", "--json"], "stderr": ["bench", "--seq-len", "many"]}[stream]
    ours, its = os.pipe()
    os.close(ours)
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: its}
    child = subprocess.Popen([sys.executable, "-c", COMMAND, *words], text=True, **settings)
    os.close(its)
    out, err = child.communicate()
    assert not out and not err and child.returncode == 128 + 13
