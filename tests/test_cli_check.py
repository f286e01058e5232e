"""`efficient-attn check`: tables, JSON and exit codes."""

import json
import os
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
"""


def check(*words: str) -> subprocess.CompletedProcess:
    """The command in a process of its own: here `torch.compile` meets no runtime shape checks."""
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-c", CODE, "check", *words], capture_output=True, text=True, env=environment
    )


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
    assert record["detail"].startswith("Writes into q: q [2, 2, 3, 4]")


@pytest.mark.parametrize(
    ("words", "message"),
    [
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
