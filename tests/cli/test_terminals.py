"""Terminals that are narrow, colourless, dumb or closed, and messages with names and texts from elsewhere."""

import os
import re
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from synthetic_records import case, costs, errors, folder

from efficient_attn.measure.record import Record
from efficient_attn.report.table import WIDEST, brief, dropped_columns, dropped_words, plain
from efficient_attn.runs.results import read

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from command_line import command

from efficient_attn_cli import console

pty = pytest.importorskip("pty", reason="there are no pseudo-terminals here")
COMMAND = "from efficient_attn_cli.main import main; main()"

# A bar, a table with marks and a refusal on a terminal with colours, without, and on a dumb one.
BAR = """
import os
from efficient_attn.report.table import Table
from efficient_attn.runs.progress import Progress
from efficient_attn_cli import console

table = Table("", ("", "error"), (("a", "0.1"), ("b", "0.9")), (), ((0, 1),), ((1, 1),))
state = {"done": 1, "total": 2, "range_s": (30, 70), "spent": 0.34, "record": None}
for settings in ({"TERM": "xterm-256color"}, {"NO_COLOR": "1"}, {"NO_COLOR": "", "TERM": "dumb"}):
    os.environ |= settings
    with console.live_bar(lambda step: print("first tables") is None) as show:
        show(Progress(outcome="of window", current="[red]exact", **state))
    console.print_tables([table])
    console.refuse("a wrong request")
    print(end="\\f", flush=True)
"""


def on_a_terminal(code):
    """What a child writes to a terminal of its own."""
    ours, its = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=its, stdout=its, stderr=its, env=environment | {"TERM": "xterm"}
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


def test_a_terminal_has_one_bar_and_styles_and_plain_lines_and_marks_without_colours():
    drawn, *uncoloured, rest = on_a_terminal(BAR).split("\f")
    assert "1/2 · 34 % of the budget · 0:30–1:10 left · [red]exact" in drawn and "of window" not in drawn
    assert re.search(r"\x1b\[1m *0\.1\*\x1b", drawn) and re.search(r"\x1b\[2m *0\.9 \x1b", drawn)
    # Lines have no tables between them.
    assert drawn.count("first tables") == 1 and not any("first tables" in text for text in uncoloured)
    assert len(uncoloured) == 2 and rest == ""
    for text in uncoloured:
        assert "[1/2] of window; 0:30–1:10 left" in text and "0.1*" in text
        assert "error: a wrong request" in text and "\x1b" not in text


def test_a_reader_that_leaves_early_ends_the_command_quietly():
    ours, its = os.pipe()
    os.close(ours)
    words = [sys.executable, "-c", COMMAND, "--help"]
    child = subprocess.Popen(words, text=True, stdout=its, stderr=subprocess.PIPE)
    os.close(its)
    assert not child.communicate()[1] and child.returncode == 1


def words(*texts):
    return Counter(word for text in texts for word in plain(text).split())


@pytest.fixture
def columns(monkeypatch, capsys):
    """Sets the width of a terminal on which nothing is coloured."""

    def set_width(width):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(width))

    monkeypatch.setenv("NO_COLOR", "1")
    return set_width


RUNS = Path(__file__).parents[2] / "results" / "epyc-2-cores"
STORED = [str(path.parent.relative_to(RUNS)) for path in sorted(RUNS.glob("**/records.jsonl"))]
SHOWN = ("bench-512-8192", "bench-256-4096", "recall-default", "swap-encoder")


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=[pytest.mark.slow] * (run not in SHOWN)) for run in STORED]
)
def test_no_word_of_a_stored_table_is_lost_or_broken_at_any_width_of_a_terminal(run, columns, capsys):
    tables = [table._replace(detail=False) for table in read(RUNS / run).tables()]
    for table, width in ((table, width) for table in tables for width in (80, 100, 160)):
        columns(width)
        console.print_tables([table])
        text, width = capsys.readouterr().out, min(width, WIDEST)
        assert max(map(len, text.splitlines())) <= width
        dropped = dropped_columns(table, width)
        assert all(len({brief(row[number]) for row in table.rows}) == 1 for number in dropped)
        columns_of = zip(table.columns, *table.rows, strict=True)
        shown = [(head.replace(",", "", 1), *map(brief, cells)) for head, *cells in columns_of]
        shown = [cells for number, cells in enumerate(shown) if number not in dropped]
        # Blocks of columns repeat the first one.
        surplus = words(text.replace("─", " ").replace("*", ""))
        surplus.subtract(
            words(table.title, *table.notes, *dropped_words(table, dropped), *map(brief, sum(shown, ())))
        )
        assert min(surplus.values()) >= 0, f"{table.title} at {width} columns:\n{text!r}"


def test_sentences_are_wrapped_between_words(columns, capsys):
    sentence = "word " * 30 + "/a/path/that/is/longer/than/the/line/and/is/copied/as/a/whole"
    columns(40)
    console.tell(sentence)
    text = capsys.readouterr().out
    assert sorted(map(len, text.splitlines()))[-2] <= 40 and words(text) == words(sentence)


# A name that erases the screen, sets the title, rings, returns to the start of the line, begins another and
# turns the direction; its first letters show that a message holds it, and that they are no markup.
WORD = "planted[red]|`"
PLANT = f"{WORD}\x1b[2J\x1b]0;title\x07\x9b31m\u202egnp\u2066\r\x7f\u2028\nforged"

RAW = re.compile("[^\n\x20-\x7e\xa0-\u2027\u202f-\u2065\u206a-\uffff]|^forged", re.MULTILINE)

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


def assert_harmless(commands, *, silent=()):
    outputs = {" ".join(words): "".join(command(*words)[1:]) for words in commands}
    raw = {words: text for words, text in outputs.items() if RAW.search(text) or "Traceback" in text}
    assert raw == {}, list(raw)
    assert [words for words, text in outputs.items() if WORD not in text] == list(silent)


def test_no_refusal_and_no_comparison_holds_a_control_character(elsewhere):
    bench = [[f"--{PLANT}"], [PLANT], ["--set", PLANT], ["--seq-len", PLANT]]
    diff = [[PLANT, PLANT], ["old", "new", "--fail-on", PLANT], ["old", "new"], ["old", "new", "--json"]]
    swap = [["--text", "text.txt", "--save", PLANT], ["--text", f"{PLANT}.none"]]
    assert_harmless(
        [
            *(("bench", *words) for words in bench),
            *(("diff", *words) for words in diff),
            *(("swap", "old", *words) for words in swap),
            ("report", PLANT),
            (PLANT,),
        ]
    )


@pytest.mark.slow
def test_no_result_holds_a_control_character_of_names_texts_or_records(elsewhere):
    computed = [(*BENCH, "--backend", BACKENDS), (*BENCH, "--backend", BACKENDS, "--json")]
    refused = [("bench", "--backend", PLANT), ("show", "--tokens", PLANT), ("check", "leaves.py:attend")]
    assert_harmless([*computed, *refused, ("report", "old")], silent=["report old"])


def test_one_file_of_the_command_line_writes_if_it_can_be_imported():
    commands = Path(__file__).parents[2] / "cli"
    writers = {path.name for path in commands.glob("*.py") if WRITES.search(path.read_text(encoding="utf-8"))}
    # Where packages are missing, the console cannot be imported.
    assert writers == {"console.py", "__init__.py"}
