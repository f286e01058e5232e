"""No message of a command holds a control character of a name or a text that came from elsewhere."""

import json
import re
import struct
from pathlib import Path

import pytest
from made_records import case, costs, errors, folder
from terminals import on_a_terminal

from efficient_attn.measure.record import Record

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")
pytest.importorskip("pty", reason="there are no pseudo-terminals here")

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
FAULT = f"""
from efficient_attn_cli import main

def broken(**_):
    raise RuntimeError({PLANT!r})

main.app = broken
main.main()
"""
WRITES = re.compile(r"\b(print|echo|secho)\(|\.write\(")
STRANGER = """
import sys
from efficient_attn.errors import UnsupportedError
from efficient_attn.registry import BackendSpec, Capabilities, NoOptions

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

def attend(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1) @ v

def _build(problem, options):
    raise RuntimeError(WORD)

named = BackendSpec(
    name=WORD, summary=WORD, options_type=NoOptions, capabilities=Capabilities(causal=True), builder=_build
)
globals()[WORD] = attend
"""
SMALL = ("--num-heads", "2", "--head-dim", "8", "--threads", "1", "--rounds", "1")
BENCH = ("bench", "--seq-len", "16", *SMALL)
MSE = ("mse", "--inputs", "gaussian", "--seq-len", "16", "--norm", "1", "--size", "4")
RECALL = ("recall", "--pairs", "16", "--steps", "2", "--seeds", "1", "--size", "4")
BACKENDS = "own.py:raises,own.py:refuses,own.py:leaves,own.py:worse,own.py:named," + f"own.py:{PLANT}"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder of files whose names and contents are all hostile."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(STRANGER.format(plant=PLANT), encoding="utf-8")
    (tmp_path / f"{PLANT}.py").write_text("def attend(q, k, v):\n    return v.clone()\n")
    (tmp_path / "leaves.py").write_text(f"import sys\nsys.exit({PLANT!r})\n", encoding="utf-8")
    (tmp_path / "raises.py").write_text(f"raise ValueError({PLANT!r})\n", encoding="utf-8")
    (tmp_path / "text.txt").write_text("words and words " * 999)
    (tmp_path / f"{PLANT}.txt").write_text("word")
    activations(tmp_path / "names.safetensors", [f"layer.0.{PLANT}", PLANT], {})
    words = json.dumps([PLANT] * 16)
    about = {"tokens": words, "model": PLANT, PLANT: PLANT}
    activations(tmp_path / "capture.safetensors", ["q", "k", "v"], about)
    activations(tmp_path / f"{PLANT}.safetensors", ["q", "k", "v"], {"scale": PLANT})
    activations(tmp_path / "patterns.safetensors", ["q", "k", "v"], {"patterns": json.dumps({"0": PLANT})})
    for name in ("old", "new"):
        machine = {"processor": PLANT, "torch": {"version": name + PLANT}}
        folder(tmp_path / name, hostile_records(name), machine)
    return tmp_path


def activations(path, names, about):
    """A safetensors file of small tensors under these names."""
    size = 2 * 16 * 8 * 4
    header = {
        name: {"dtype": "F32", "shape": [2, 16, 8], "data_offsets": [number * size, (number + 1) * size]}
        for number, name in enumerate(names)
    }
    text = json.dumps({**header, "__metadata__": about}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size * len(names)))


def hostile_records(name):
    failed = Record(case=case("time", PLANT, 256, backend=PLANT), status="error", reason=PLANT + name)
    inputs = (f"{PLANT}(layer=1)",)
    return [*costs(("exact", PLANT)), *errors((PLANT,), inputs), failed]


def written(commands, **variables):
    """What each command writes to a terminal that is sent no colours."""
    with open("commands.json", "w", encoding="utf-8") as file:
        json.dump(commands, file)
    settings = {"NO_COLOR": "1", "TERM": "dumb", **variables}
    text = on_a_terminal(RUN, columns=2000, **settings).replace("\r\n", "\n")
    return dict(zip(map(" ".join, commands), text.split("\n§\n")[1:], strict=True))


def assert_harmless(outputs, *, silent=()):
    raw = {command: text for command, text in outputs.items() if RAW.search(text) or "Traceback" in text}
    assert raw == {}, list(raw)
    assert [command for command, text in outputs.items() if WORD not in text] == list(silent)


# Requests that are refused before torch is loaded, and others.
EARLY = (
    ("bench", f"--{PLANT}"),
    ("bench", PLANT),
    ("bench", "--set", PLANT),
    ("bench", "--seq-len", PLANT),
    ("bench", "--json", PLANT),
    ("diff", PLANT, PLANT),
    ("diff", "old", "new", "--fail-on", PLANT),
    ("diff", "old", "new"),
    ("diff", "old", "new", "--json", "-"),
    ("report", PLANT),
    ("report", f"{PLANT}.txt"),
    ("swap", "old", "--text", "text.txt", "--save", PLANT),
    ("swap", "old", "--text", f"{PLANT}.none"),
    (PLANT,),
)
LATE = (
    ("bench", "--backend", PLANT),
    ("bench", "--set", f"window.{PLANT}=1", "--backend", "window"),
    ("bench", "--set", f"window.window={PLANT}", "--backend", "window"),
    *(
        ("bench", option, PLANT)
        for option in ("--of", "--device", "--dtype", "--budget", "--execution", "--timeout")
    ),
    ("bench", "--out", f"{PLANT}.txt"),
    ("bench", "--inputs", PLANT),
    ("bench", "--inputs", f"{PLANT}.safetensors"),
    ("bench", "--inputs", "names.safetensors"),
    ("mse", "--inputs", "names.safetensors"),
    ("mse", "--inputs", "patterns.safetensors", "--layers", "0"),
    *(("mse", option, PLANT) for option in ("--of", "--metric", "--norm", "--layers")),
    ("show", "--tokens", PLANT),
    ("show", "--inputs", f"{PLANT}.txt"),
    ("recall", "--backend", PLANT),
    ("swap", PLANT, "--save", "a.safetensors"),
    ("swap", PLANT),
    ("check", PLANT),
    ("check", f"{PLANT}:attend"),
    ("check", f"own.py:{PLANT}no"),
    ("check", "leaves.py:attend"),
    ("check", "raises.py:attend"),
)


def test_no_refusal_holds_a_control_character_of_what_it_refuses(elsewhere):
    assert_harmless(written(EARLY))


@pytest.mark.slow
def test_no_refusal_by_what_computes_holds_a_control_character(elsewhere):
    assert_harmless(written(LATE))


RUNS = (
    (*BENCH, "--backend", BACKENDS),
    (*BENCH, "--backend", BACKENDS, "--json", "-"),
    (*BENCH, "--backend", f"{PLANT}.py:attend", "--out", f"{PLANT}.out"),
    (*BENCH, "--dry-run", "--backend", f"{PLANT}.py:attend"),
    ("bench", "--inputs", "encoder", "--seq-len", "16", "--rounds", "1", "--backend", BACKENDS),
    (*MSE, "--backend", BACKENDS),
    (*MSE, "--backend", BACKENDS, "--json", "-"),
    ("show", "--inputs", "capture.safetensors", "--head", "0", "--tokens", "0:4", "--backend", BACKENDS),
    (*RECALL, "--backend", BACKENDS),
    ("report", "old"),
)


@pytest.mark.slow
@pytest.mark.usefixtures("unisolated")
def test_no_result_holds_a_control_character_of_names_texts_or_records(elsewhere):
    assert_harmless(written(RUNS), silent=["report old"])


@pytest.mark.slow
def test_no_listing_holds_a_control_character_of_a_plug_in(elsewhere):
    about = elsewhere / "stranger-1.0.dist-info"
    about.mkdir()
    name = PLANT.partition("\r")[0]
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {name}\n", encoding="utf-8"
    )
    points = f"[efficient_attn.backends]\n{name} = {name}\ngone = {name}\nexact = {name}\n"
    (about / "entry_points.txt").write_text(points, encoding="utf-8")
    assert_harmless(written([("list",), ("list", "--json"), ("check", "gone")], PYTHONPATH=str(elsewhere)))


def test_a_fault_of_ours_is_a_traceback_without_control_characters():
    text = on_a_terminal(FAULT, "list", NO_COLOR="1", TERM="dumb").replace("\r\n", "\n")
    assert (
        text.startswith("Traceback")
        and f"RuntimeError: {WORD}" in text
        and set(RAW.findall(text)) <= {"forged"}
    )


def test_one_file_of_the_command_line_writes_if_it_can_be_imported():
    commands = Path(__file__).parent.parent / "cli"
    writers = {path.name for path in commands.glob("*.py") if WRITES.search(path.read_text(encoding="utf-8"))}
    # Where packages are missing, the console cannot be imported.
    assert writers == {"console.py", "__init__.py"}
