"""Terminals that are narrow, colourless, dumb or closed, and messages with names and texts from elsewhere."""

import json
import os
import pickle
import re
import struct
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from made_records import case, costs, errors, folder

from efficient_attn.measure.record import Record
from efficient_attn.report.table import WIDEST, brief, constants, dropped_columns, dropped_words, plain
from efficient_attn.studies.results import read

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")
pytest.importorskip("pty", reason="there are no pseudo-terminals here")

COMMAND = "from efficient_attn_cli.main import main; main()"


def on_a_terminal(code, *words, columns=80, **variables):
    """What a child writes to a terminal of its own."""
    import fcntl
    import pty
    import termios

    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    settings = {"TERM": "xterm-256color", **variables}
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    child = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdin=its, stdout=its, stderr=its, env=environment | settings
    )
    os.close(its)
    written = b""
    # The end of a terminal is an error.
    with suppress(OSError):
        while part := os.read(ours, 1 << 16):
            written += part
    os.close(ours)
    child.wait()
    return written.decode()


STEP = """
from efficient_attn.studies.engine import Progress
from efficient_attn_cli import console

outcome = "a-backend(of=a, long=name), 65536 tokens, time: ok"
with console.live_bar(2) as show:
    show(Progress(done=1, total=2, remaining_s=45.0, outcome=outcome, record=None))
"""
BAR = """
from efficient_attn.report.table import Table
from efficient_attn.studies.engine import Progress
from efficient_attn_cli import console

with console.live_bar(2) as show:
    step = Progress(
        done=1, total=2, remaining_s=45.0, outcome="of window", record=None, range_s=(30, 70), spent=0.34,
        current="[red]exact",
    )
    show(step)
console.print_tables([Table("", ("", "error"), (("a", "0.1"), ("b", "0.9")), (), ((0, 1),), ((1, 1),))])
"""
# Tables of a file, each at all widths.
DRAW = """
import fcntl, pickle, struct, sys, termios
from efficient_attn_cli import console

tables = pickle.load(open(sys.argv[1], "rb"))
for columns in map(int, sys.argv[2:]):
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    for table in tables:
        console.print_tables([table])
        print(end="\\f", flush=True)
"""
WIDTHS = (80, 100, 120, 160, 200)
RESULTS = Path(__file__).parent.parent / "results"


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_a_terminal_that_cannot_draw_gets_plain_lines(variables):
    written = on_a_terminal(STEP, **variables)
    assert written == "[1/2] a-backend(of=a, long=name), 65536 tokens, time: ok; 0:45 left\r\n"
    refused = on_a_terminal(COMMAND, "bench", "--seq-len", "many", **variables)
    assert refused.startswith("error: --seq-len") and "\x1b" not in refused


def test_a_terminal_has_one_bar_and_styles_and_plain_lines_and_marks_without_colours():
    drawn, plain_text = on_a_terminal(BAR), on_a_terminal(BAR, NO_COLOR="1")
    assert "1/2 · 34 % of the budget · 0:30–1:10 left · [red]exact" in drawn and "of window" not in drawn
    assert re.search(r"\x1b\[1m *0\.1\*\x1b", drawn) and re.search(r"\x1b\[2m *0\.9 \x1b", drawn)
    assert "[1/2] of window; 0:30–1:10 left" in plain_text and "0.1*" in plain_text
    assert "\x1b" not in plain_text


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
    assert len(tables) > 40
    (tmp_path / "tables.pickle").write_bytes(pickle.dumps(tables))
    written = on_a_terminal(
        DRAW, str(tmp_path / "tables.pickle"), *map(str, WIDTHS), TERM="xterm", NO_COLOR="1"
    )
    drawn = written.replace("\r", "").split("\f")[:-1]
    assert len(drawn) == len(tables) * len(WIDTHS)
    for number, text in enumerate(drawn):
        table, columns = tables[number % len(tables)], min(WIDTHS[number // len(tables)], WIDEST)
        assert max(map(len, text.splitlines())) <= columns
        dropped = dropped_columns(table, columns)
        assert {*dropped} <= {*constants(table)}
        columns_of = zip(table.columns, *table.rows, strict=True)
        shown = [(head.replace(",", "", 1), *map(brief, cells)) for head, *cells in columns_of]
        shown = [cells for number, cells in enumerate(shown) if number not in dropped]
        # Blocks of columns repeat the first ones.
        surplus = words(text.replace("─", " ").replace("*", ""))
        surplus.subtract(
            words(table.title, *table.notes, *dropped_words(table, dropped), *map(brief, sum(shown, ())))
        )
        assert min(surplus.values()) >= 0, f"{table.title} at {columns} columns:\n{text!r}"


def test_sentences_are_wrapped_between_words():
    run = str(RESULTS / "epyc-2-cores" / "advise")
    wide, narrow = (
        on_a_terminal(COMMAND, "diff", run, run, columns=columns, NO_COLOR="1") for columns in (1000, 60)
    )
    assert max(map(len, wide.splitlines())) > 60 >= max(map(len, narrow.splitlines()))
    assert words(wide) == words(narrow)


# A name that erases the screen, sets the title, rings, returns to the start of the line, begins another and
# turns the direction; its first letters show that a message holds it, and that they are no markup.
WORD = "planted[red]|`"
PLANT = f"{WORD}\x1b[2J\x1b]0;title\x07\x9b31m\u202egnp\u2066\r\x7f\u2028\nforged"

RAW = re.compile("[^\n\x20-\x7e\xa0-\u2027\u202f-\u2065\u206a-\uffff]|^forged", re.MULTILINE)

RUN = """
import json, sys
from efficient_attn_cli.main import main
for words in json.load(open("commands.json")):
    print("\\n§", flush=True)
    try:
        main(words)
    except SystemExit:
        pass
"""
WRITES = re.compile(r"\b(print|echo|secho)\(|\.write\(")
STRANGER = """
import sys
from efficient_attn.errors import UnsupportedError

WORD = {plant!r}

def raises(q, k, v):
    raise ValueError(WORD)

def refuses(q, k, v):
    raise UnsupportedError(WORD)

def leaves(q, k, v):
    sys.exit(WORD)

class Worse(Exception):
    def __str__(self):
        raise ValueError(WORD)

def worse(q, k, v):
    raise Worse

globals()[WORD] = raises
"""
SMALL = ("--num-heads", "2", "--head-dim", "8", "--threads", "1", "--rounds", "1")
BENCH = ("bench", "--seq-len", "16", "--no-error", *SMALL)
BACKENDS = f"own.py:raises,own.py:refuses,own.py:leaves,own.py:worse,own.py:{PLANT}"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder of files whose names and contents are all hostile."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(STRANGER.format(plant=PLANT), encoding="utf-8")
    (tmp_path / "leaves.py").write_text(f"import sys\nsys.exit({PLANT!r})\n", encoding="utf-8")
    (tmp_path / "text.txt").write_text("words and words " * 999)
    for name in ("old", "new"):
        machine = {"processor": PLANT, "torch": {"version": name + PLANT}}
        folder(tmp_path / name, hostile_records(name), machine)
    return tmp_path


def hostile_records(name):
    failed = Record(case=case("time", PLANT, 256, backend=PLANT), status="error", reason=PLANT + name)
    inputs = (f"{PLANT}(layer=1)",)
    return [*costs(("exact", PLANT)), *errors((PLANT,), inputs), failed]


def written(commands):
    """What each command writes to a terminal that is sent no colours."""
    with open("commands.json", "w", encoding="utf-8") as file:
        json.dump(commands, file)
    text = on_a_terminal(RUN, columns=2000, NO_COLOR="1", TERM="dumb").replace("\r\n", "\n")
    return dict(zip(map(" ".join, commands), text.split("\n§\n")[1:], strict=True))


def assert_harmless(outputs, *, silent=()):
    raw = {command: text for command, text in outputs.items() if RAW.search(text) or "Traceback" in text}
    assert raw == {}, list(raw)
    assert [command for command, text in outputs.items() if WORD not in text] == list(silent)


# Requests that are refused before torch is loaded.
EARLY = (
    ("bench", f"--{PLANT}"),
    ("bench", PLANT),
    ("bench", "--set", PLANT),
    ("bench", "--seq-len", PLANT),
    ("diff", PLANT, PLANT),
    ("diff", "old", "new", "--fail-on", PLANT),
    ("diff", "old", "new"),
    ("diff", "old", "new", "--json"),
    ("report", PLANT),
    ("swap", "old", "--text", "text.txt", "--save", PLANT),
    ("swap", "old", "--text", f"{PLANT}.none"),
    (PLANT,),
)


def test_no_refusal_holds_a_control_character_of_what_it_refuses(elsewhere):
    assert_harmless(written(EARLY))


@pytest.mark.slow
def test_no_result_holds_a_control_character_of_names_texts_or_records(elsewhere):
    computed = [(*BENCH, "--backend", BACKENDS), (*BENCH, "--backend", BACKENDS, "--json")]
    refused = [("bench", "--backend", PLANT), ("show", "--tokens", PLANT), ("check", "leaves.py:attend")]
    assert_harmless(written([*computed, *refused, ("report", "old")]), silent=["report old"])


def test_one_file_of_the_command_line_writes_if_it_can_be_imported():
    commands = Path(__file__).parent.parent / "cli"
    writers = {path.name for path in commands.glob("*.py") if WRITES.search(path.read_text(encoding="utf-8"))}
    # Where packages are missing, the console cannot be imported.
    assert writers == {"console.py", "__init__.py"}
