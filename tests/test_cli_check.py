"""`efficient-attn check`: tables, JSON and exit codes."""

import json
import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from efficient_attn_cli.main import main

CODE = "from efficient_attn_cli.main import main; main()"
ATTEND = """
def attend(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1) @ v

def broken(q, k, v):
    return attend(q.mul_(2), k, v)

def endless(q, k, v):
    while q.requires_grad:
        pass
    return attend(q, k, v)

def segfaults(q, k, v):
    import ctypes
    return ctypes.string_at(0) if q.requires_grad else attend(q, k, v)
"""
TRIED = ("gradients_are_those_of_finite_differences", "order_of_keys_does_not_matter")


def check(*words: str) -> subprocess.CompletedProcess:
    """The command in a process of its own: here `torch.compile` meets no runtime shape checks."""
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-c", CODE, "check", *words], capture_output=True, text=True, env=environment
    )


def main_code(*words: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(list(words))
    return int(exit_.value.code)


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(ATTEND)
    return path


@pytest.mark.slow
def test_a_registered_backend_is_checked_in_a_table_that_ends_in_a_verdict():
    run = check("exact-dense")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "padding contents change no bit" in run.stdout and "kept" in run.stdout
    assert run.stdout.splitlines()[-1].startswith("exact-dense: ")
    assert "broken" not in run.stdout


@pytest.mark.slow
def test_a_function_in_a_file_is_checked_and_told_what_could_not_be(mine):
    run = check(f"{mine}:attend")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "padding_contents_change_no_bit: could not check. It declares no key mask." in run.stdout
    assert "equals softmax attention " in run.stdout and "kept without promise" in run.stdout


@pytest.mark.slow
def test_a_broken_function_ends_with_exit_code_1_and_the_smallest_input_in_strict_json(mine):
    run = check(f"{mine}:broken", "--json")
    assert run.returncode == 1, run.stderr

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    records = json.loads(run.stdout, parse_constant=refuse)
    (record,) = [one for one in records if one["check"] == "inputs_are_not_written_to"]
    assert (record["outcome"], record["failed"]) == ("broken", True)
    assert "in-place operation. On q [2, 2, 3, 4]" in record["detail"]


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        pytest.param(
            "endless", "The check took longer than 5 s (raise it with --timeout).", marks=pytest.mark.slow
        ),
        ("segfaults", "The check did not end: the process crashed with signal 11 (SIGSEGV)."),
    ],
)
def test_a_check_that_hangs_or_crashes_is_a_row_and_the_next_one_is_made(name, detail, mine, capfd):
    assert main_code("check", f"{mine}:{name}", "--only", ",".join(TRIED), "--timeout", "5s", "--json") == 1
    records = json.loads(capfd.readouterr().out)
    assert [record["check"] for record in records] == list(TRIED)
    assert [record["outcome"] for record in records] == ["broken", "kept"]
    assert records[0]["detail"] == detail and records[0]["failed"]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "found"), [((), False), (("--long",), True)])
def test_long_adds_sequences_that_the_short_form_does_not_reach(words, found, tmp_path, capfd):
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        "def attend(q, k, v):\n"
        "    if q.shape[2] > 2000:\n"
        "        v = v.roll((1, 1), dims=(0, 1))\n"
        "    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1) @ v\n"
    )
    alone = "every_sequence_is_its_single_call,every_head_is_its_single_call"
    main_code("check", f"{path}:attend", "--only", alone, "--json", *words)
    outcomes = [record["outcome"] for record in json.loads(capfd.readouterr().out)]
    assert outcomes == ["broken" if found else "kept"] * 2


@pytest.mark.slow
def test_after_three_checks_that_hang_the_others_are_not_tried(tmp_path, capfd):
    path = tmp_path / "mine.py"
    path.write_text("def attend(q, k, v):\n    while True:\n        pass\n")
    assert main_code("check", f"{path}:attend", "--timeout", "2s") == 1
    out = capfd.readouterr().out
    # Of the checks that run beside one another each may be the third.
    hung = out.count("The check took longer than 2 s")
    assert 3 <= hung <= 6 and re.search("Not tried: [3-6] earlier checks did not end", out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("exact", "--only", "nonesuch"), "No check is called 'nonesuch'."),
        (("softmax",), "No backend is called 'softmax'. Here it is 'exact'."),
        (("nowhere.py:attend",), "There is no file 'nowhere.py' to take a backend from."),
        ((), "Missing argument 'BACKEND'"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(words, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["check", *words])
    out, err = capsys.readouterr()
    assert exit_.value.code == 2 and out == ""
    assert message in err and len(err.splitlines()) == 1
