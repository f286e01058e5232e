"""`--plan`: a file in the place of flags, and the file that repeats a run."""

import tomllib
from pathlib import Path

import pytest

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from efficient_attn.runner.records import read
from efficient_attn_cli.main import main
from efficient_attn_cli.plan_file import _toml

pytestmark = pytest.mark.usefixtures("hasty", "undrawn")

BENCH = ["--seq-len", "16", "--num-heads", "2", "--head-dim", "8", "--budget", "1h", "--isolate", "none",
         "--backend", "window", "--set", "window.window=5,7", "--causal", "--threads", "1"]  # fmt: skip
MSE = ["--size", "8", "--inputs", "gaussian", "--norm", "1", "--seq-len", "32", "--draws", "2",
       "--backend", "performer-trig,window", "--seed", "3"]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*words):
    with pytest.raises(SystemExit) as exit_:
        main([str(word) for word in words])
    return exit_.value.code


def plan(text, name="plan.toml"):
    Path(name).write_text(text)
    return name


def measured(folder):
    return sorted(record.case.key for record in read(f"{folder}/records.jsonl").records)


@pytest.mark.parametrize(("name", "words"), [("bench", BENCH), ("mse", MSE)])
def test_a_run_from_the_plan_that_a_run_wrote_measures_the_same(name, words):
    assert command(name, *words, "--out", "first") == 0
    assert command(name, "--plan", "first/plan.toml", "--out", "second") == 0
    assert measured("first") == measured("second")
    assert Path("first/plan.toml").read_text() == Path("second/plan.toml").read_text()
    written = tomllib.loads(Path("first/plan.toml").read_text())
    # What was left open is settled, and where the run went is no part of it.
    assert "out" not in written
    if name == "bench":
        assert (written["device"], written["dtype"], written["isolate"]) == ("cpu", "float32", "none")
        assert written["causal"] is True and written["set"] == ["window.window=5,7"]


def test_the_command_line_wins_over_the_plan(capsys):
    path = plan("seq-len = [16, 32]\nbackend = ['exact-dense', 'window']\ncausal = true\n")
    assert command("bench", "--plan", path, "--dry-run") == 0
    planned = capsys.readouterr().out
    assert "12 points" in planned and "exact-dense" in planned
    # Wherever --plan stands.
    assert command("bench", "--seq-len", "64", "--dry-run", "--plan", path, "--backend", "linformer",
                   "--no-causal") == 0  # fmt: skip
    planned = capsys.readouterr().out
    assert "4 points" in planned and "exact-dense" not in planned


WRONG = [
    ("seq-ln = 3", "No key of plan.toml is called 'seq-ln'. Did you mean 'seq-len'?"),
    ("num_heads = 3", "Did you mean 'num-heads'?"),
    ("head-dim = 'many'", "plan.toml: head-dim cannot be 'many': "),
    ("batch = 0", "batch cannot be 0: Input should be greater than or equal to 1"),
    ("batch = 1.5", "plan.toml: batch cannot be 1.5: "),
    ("causal = 'yes'", "plan.toml: causal is true or false, not 'yes'"),
    ("seq-len = true", "plan.toml: seq-len is text, a number or a list of them, not True"),
    ("[backend]\nname = 'window'", "plan.toml: backend is text, a number or a list of them, not {'name'"),
    ("seq-len = ", "--plan: plan.toml is no TOML: "),
    ("seq-len = " + "[" * 100_000, "--plan: plan.toml is no TOML: "),
    ("seq-len = 3\nseq-len = 3", "--plan: plan.toml is no TOML: "),
    ("#" * (1 << 20) + "\n", "plan.toml is larger than 1048576 bytes"),
    ("plan = 'other.toml'", "No key of plan.toml is called 'plan'"),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[text[:20] for text, _ in WRONG])
def test_a_wrong_plan_ends_in_one_line_that_names_key_and_file(text, message, capsys):
    assert command("bench", "--plan", plan(text)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


def test_a_plan_that_cannot_be_read_is_named(folder, capsys):
    (folder / "bytes.toml").write_bytes(b"\xff")
    for name, message in (("none", "cannot read none"), (".", "cannot read ."), ("bytes.toml", "is no TOML")):
        assert command("mse", "--plan", name) == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("value", [True, 3, ["a", "b,c"], 'a"b\\c\n\x7f\x00', "[red] \U0001f600 \u202e"])
def test_what_is_written_as_toml_is_read_again(value):
    assert tomllib.loads(f"key = {_toml(value)}") == {"key": value}
