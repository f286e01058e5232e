"""What is written where nobody can draw: narrow, colourless, dumb and closed terminals."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from terminals import on_a_terminal

from efficient_attn.report.escape import plain
from efficient_attn.studies.results import read

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")
pytest.importorskip("pty", reason="there are no pseudo-terminals here")

CODE = """
from efficient_attn.studies.engine import Progress
from efficient_attn_cli import console

outcome = "a-backend(of=a, long=name), 65536 tokens, time: ok"
console.show_step(Progress(done=1, total=2, remaining_s=45.0, outcome=outcome, record=None))
"""
# Tables of a JSON file, each at all widths.
DRAW = """
import fcntl, json, struct, sys, termios
from efficient_attn.report.table import Table
from efficient_attn_cli import console

tables = [Table(title, columns, rows, notes) for title, columns, rows, notes in json.load(open(sys.argv[1]))]
for columns in map(int, sys.argv[2:]):
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    for table in tables:
        console.print_tables([table])
        print(end="\\f", flush=True)
"""
WIDTHS = (80, 100, 120, 160, 200)
RESULTS = Path(__file__).parent.parent / "results"
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


def words(*texts):
    return Counter(word for text in texts for word in plain(text).split())


def test_no_word_of_a_stored_table_is_lost_or_broken_at_any_width_of_a_terminal(tmp_path):
    runs = sorted(RESULTS.glob("**/records.jsonl"))
    tables = [table for run in runs for table in read(run.parent).tables()]
    assert len(tables) > 50
    (tmp_path / "tables.json").write_text(json.dumps(tables))
    written = on_a_terminal(
        DRAW, str(tmp_path / "tables.json"), *map(str, WIDTHS), TERM="xterm", NO_COLOR="1"
    )
    drawn = written.replace("\r", "").split("\f")[:-1]
    assert len(drawn) == len(tables) * len(WIDTHS)
    for number, text in enumerate(drawn):
        table, columns = tables[number % len(tables)], WIDTHS[number // len(tables)]
        assert max(map(len, text.splitlines())) <= columns
        expected = words(
            table.title, *table.notes, *table.columns, *(cell for row in table.rows for cell in row)
        )
        # Blocks of columns repeat the first ones, and nothing else.
        surplus = words(text.replace("─", " "))
        surplus.subtract(expected)
        blocks = text.count("─\n")
        names = [
            words(*table.columns[:count], *(cell for row in table.rows for cell in row[:count]))
            for count in range(1, len(table.columns) + 1)
        ]
        assert any(
            +surplus == Counter({word: (blocks - 1) * times for word, times in name.items() if blocks > 1})
            and min(surplus.values()) >= 0
            for name in names
        ), f"{table.title} at {columns} columns, {blocks} {+surplus}:\n{text!r}"


def test_sentences_are_wrapped_between_words():
    run = str(RESULTS / "epyc-2-cores" / "bench-ranks")
    wide, narrow = (
        on_a_terminal(COMMAND, "diff", run, run, columns=columns, NO_COLOR="1") for columns in (1000, 60)
    )
    assert max(map(len, wide.splitlines())) > 60 >= max(map(len, narrow.splitlines()))
    assert words(wide) == words(narrow)
