"""The command line as a whole: help, exit codes, what the commands of studies print, write and refuse."""

import json
import re
import sys
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
from synthetic_records import case, costs
from typer.main import get_command

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from command_line import command

import efficient_attn as ea
from efficient_attn.errors import DataError
from efficient_attn.measure.record import Record, replace
from efficient_attn.runs.results import Results
from efficient_attn.runs.store import OVER_BUDGET
from efficient_attn_cli import DONE, INTERRUPTED, NOTHING_MEASURED, SOME_NOT_MEASURED
from efficient_attn_cli.command import exit_code
from efficient_attn_cli.main import COMMANDS, GROUPS, app, main


def test_list_tells_every_backend_its_promises_and_its_paper():
    rows = json.loads(command("list", "--json")[1])
    assert tuple(row["name"] for row in rows) == ea.list_backends()
    assert all({"causal", "key_mask", "exact", "options", "paper"} <= set(row) for row in rows)
    table = command("list")[1]
    assert all(f" {name} " in table for name in ea.list_backends())


def test_env_tells_the_machine_in_json_and_in_lines_and_version_that_of_the_package():
    assert json.loads(command("env", "--json")[1])["processor"]
    assert "torch.version" in command("env")[1]
    assert command("--version") == (0, f"efficient-attn {ea.__version__}\n", "")
    assert command() == command("--help")
    assert ea.__version__ == version("efficient-attn")


def options_of(name, flag):
    """Options in a help text, those of help aside, and its number of lines."""
    lines = command(name, flag)[1].splitlines()
    return len([one for one in lines if re.match(r"  (-\w, )?--", one) and "--help" not in one]), len(lines)


def test_twelve_commands_have_few_options_on_one_screen(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert len(COMMANDS) == len(app.registered_commands) == 12
    shown = {name: options_of(name, "--help") for name in COMMANDS}
    # Some commands have no second help text.
    whole = {name: options_of(name, "--help-all")[0] or shown[name][0] for name in COMMANDS}
    for name in ("advise", "swap"):
        assert "--dtype" in command(name, "--help")[1]
    assert {name: pair for name, pair in shown.items() if pair[0] > 16 or pair[1] > 40} == {}
    assert sum(whole.values()) <= 160 and whole["bench"] <= 26, whole


def test_the_help_text_has_every_command_in_its_group(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    code, text, _ = command("--help")
    assert code == 0
    groups = {part.split(":\n")[0]: re.findall(r"^  (\S+)  ", part, re.M) for part in text.split("\n\n")[3:]}
    assert {name: tuple(rows) for name, rows in groups.items()} == GROUPS
    assert not re.search(r"\w\.\.\.$", text, re.M)


def test_commands_that_messages_name_exist_with_their_flags():
    commands = get_command(app).commands
    flags = {flag for command in commands.values() for one in command.params for flag in one.opts}
    for path in Path(ea.__file__).parent.glob("[ims]*/*.py"):
        text = path.read_text(encoding="utf-8")
        assert {*re.findall(r"(?:with |\()(--[a-z-]+)", text)} <= flags, path
        assert {*re.findall(r"efficient-attn ([a-z]+) (?:[A-Z-])", text)} <= {*commands}, path


REFUSED, SKIPPED, BROKEN = "unsupported", "skipped", "error"


def results(*statuses, labels=("exact", "window", "linformer"), interrupted=False):
    """Results in which the last labels have these statuses, and all before them were measured."""
    failed = dict(zip(reversed(labels), reversed(statuses), strict=False))
    records = costs([label for label in labels if label not in failed], (256,))
    for label, status in failed.items():
        records.append(Record(case=case("time", label, 256), status=status, reason="because"))
    return Results(records, environment={}, interrupted=interrupted)


def elsewhere(status):
    """Results of backends that were measured, of which one was asked for on other inputs too."""
    measured, (*_, last) = results().records, results(status).records
    return Results([*measured, replace(last, case=replace(last.case, inputs="decoder(layer=19)"))])


def skipped(**fields):
    """Results in which a skipped point has a reason or a value."""
    return Results([replace(record, **fields) for record in results(SKIPPED).records])


BOTH = ["window", "linformer"]


@pytest.mark.parametrize(
    ("outcome", "named", "code"),
    [
        (results(), None, DONE),
        (results(REFUSED), None, DONE),
        (results(SKIPPED), None, DONE),
        (skipped(reason=OVER_BUDGET), None, SOME_NOT_MEASURED),
        # Theory stands for a kernel entry that draws cannot show.
        (skipped(kernel_value=1.0), BOTH, DONE),
        (results(BROKEN), None, SOME_NOT_MEASURED),
        (results(BROKEN, interrupted=True), None, INTERRUPTED),
        (results(REFUSED), BOTH, SOME_NOT_MEASURED),
        # Exact attention was measured beside them, but nobody asked for it.
        (results(REFUSED, BROKEN), BOTH, NOTHING_MEASURED),
        (results(REFUSED, BROKEN), ["exact", *BOTH], SOME_NOT_MEASURED),
        (results(REFUSED, REFUSED, SKIPPED), None, NOTHING_MEASURED),
        # Nor for a yardstick.
        (results(BROKEN, labels=("attention := v", "window")), ["window"], NOTHING_MEASURED),
        (results(BROKEN, "ok", labels=("uniform attention", "window")), ["window"], DONE),
        # A backend that refuses some inputs and is measured on others is expected.
        (elsewhere(REFUSED), ["linformer"], DONE),
        (elsewhere(SKIPPED), ["linformer"], SOME_NOT_MEASURED),
    ],
)
def test_the_exit_code_tells_what_was_asked_for_and_not_measured(outcome, named, code):
    assert exit_code(outcome, named) == code
    # A run that left points without a record is not done.
    outcome.complete = False
    assert exit_code(outcome, named) == (code or SOME_NOT_MEASURED)


OWN = """
def mean(q, k, v):
    return v.mean(dim=-2, keepdim=True).expand_as(v).contiguous()


def talkative(q, k, v):
    print("hello")
    return v.clone()


def endless():
    for _ in range(10**9):
        pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch, hasty, unisolated):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


SMALL = "bench --seq-len 16 --num-heads 2 --head-dim 8 --budget 1h --no-error"


def test_a_run_prints_tables_and_last_the_conclusion_and_the_path_of_its_page(folder, monkeypatch):
    monkeypatch.setattr("efficient_attn.report.files.KINDS", ("svg",))
    words = "bench --inputs encoder --seq-len 24 --rounds 1 --set linformer.rank=9"
    code, out, err = command(*words.split(), "--backend", "linformer,own.py:mean")
    assert code == 0
    page, shown = folder / out.splitlines()[-1], " ".join(out.split())
    for text in ("Encoder, layers 0, 1, 5: 12 heads of 32", " linformer(rank=9) ", " own.py:mean "):
        assert text in shown
    assert page.parent.parent.name == "runs" and page.parent.name.startswith("bench-")
    names = {path.name for path in page.parent.iterdir()}
    assert page.name in names and {"records.jsonl", "summary.csv", "bench.svg", "report.html"} <= names
    assert "left" in err and "\x1b" not in out + err


def test_errors_of_weights_are_shown_beside_their_floor(folder, undrawn):
    words = "mse --of weights --inputs gaussian --seq-len 24 --head-dim 4 --norm 1 --size 4,8 --draws 2"
    code, out, _ = command(*words.split(), "--backend", "performer-positive,own.py:mean")
    assert code == 0
    title, floor = "Relative error of the attention weights: gaussian, norm 1", "floor of rank-m weights"
    assert title in out and floor in out and "best unbiased estimate" in out
    assert "Error of the attention weights. gaussian, norm 1: no map of 8 features below" in " ".join(
        out.split()
    )


def test_what_a_backend_prints_stays_out_of_the_results(folder, undrawn, capfd, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/efficient-attn", *SMALL.split(), "--out", "out"])
    with pytest.raises(SystemExit, match=r"^0$"):
        main([*SMALL.split(), "--backend", "own.py:talkative", "--json", "--out", "out"])
    out, err = capfd.readouterr()
    assert json.loads(out)["records"] and "hello" in err
    assert Path("out/command.txt").read_text() == f"efficient-attn {SMALL} --out out\n"


def full(*_, **__):
    raise DataError("Cannot write it: No space left on device.")


@pytest.mark.parametrize("late", ["results.write", "results.write_all"])
def test_a_run_whose_files_cannot_be_written_keeps_its_records_and_exits_with_3(late, folder, monkeypatch):
    monkeypatch.setattr(f"efficient_attn.runs.{late}", full)
    code, out, err = command(*SMALL.split(), "--backend", "own.py:mean", "--out", "out")
    assert code == SOME_NOT_MEASURED and len(ea.read("out")) == 4
    assert "No space left on device" in err and "own.py:mean" in out


def test_a_dry_run_tells_what_would_not_fit(folder, monkeypatch):
    monkeypatch.setattr("efficient_attn.runs.workload.available_bytes", lambda device: 2**30)
    out = command("bench", "--dry-run", "--seq-len", "16,64k", "--backend", "exact-dense")[1]
    assert "needs about 384 GiB, the limit is 717 MiB" in out


# Refusals of text; those of values are in test_bad_input.py.
WRONG = [
    ("bench --seq-len 256 512", "Unexpected argument '512'. Use commas, as in --seq-len 256,512"),
    ("bench --set window.window=0", "window is at least 1"),
    ("bench --max-error little", "--max-error"),
    ("bench --inputs own.py", "is not a valid safetensors file"),
    ("mse --size many", "--size cannot be 'many'"),
    ("mse --norm inf", "--norm is made of finite numbers above 0, such as 0.5,1, not 'inf'"),
    ("mse --layers first", "--layers is made of whole numbers, such as 0,1,5, not 'first'"),
    ("recall --steps many", "'--steps': Input should be a valid integer"),
    ("show --text page.txt", "--inputs"),
    ("mse --rank 64", "--size"),
    ("bench --num_features 64", "--set"),
    ("mse --sed 3", "--seed"),
    ("advise own.py:endless --budget 3s", "The budget ended before anything was measured"),
]


@pytest.mark.parametrize(("words", "message"), WRONG, ids=[words for words, _ in WRONG])
def test_a_wrong_request_ends_in_one_line_before_anything_is_measured(words, message, folder, monkeypatch):
    monkeypatch.setattr("efficient_attn.runs.engine.Engine.run", lambda self: pytest.fail("measured"))
    # An alarm amid imports is noticed by other code: this one prints a line, and three seconds suffice.
    with suppress(ImportError):
        import_module("huggingface_hub.file_download")
    code, out, err = command(*words.split())
    assert (code, out) == (2, "") and err.count("\n") == 1 and err.startswith("error: ") and message in err
    assert not Path("runs").exists()
