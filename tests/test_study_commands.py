"""The command of every study: help, JSON, dry run, folder, resume, refusals and exit codes."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from quick_runs import OWN, QUICK, cases, command, flags, run, study_of, words_of

from efficient_attn.studies import engine, run_folder, studies

# One study stands for all in the quick tests that take seconds for each; the slow tests have the others.
ONE_OF_ALL = pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=[pytest.mark.slow] * (one != "bench")) for one in sorted(studies())],
    indirect=True,
)

# The process ends after its first record, as by SIGKILL from outside.
KILLED = """
import os, signal, sys

from efficient_attn.studies import run_folder
from efficient_attn_cli.main import main

append = run_folder.append


def last(path, record):
    append(path, record)
    os.kill(os.getpid(), signal.SIGKILL)


run_folder.append = last
main(sys.argv[1:])
"""


@pytest.fixture(params=sorted({*studies(), *QUICK}))
def name(request: pytest.FixtureRequest) -> str:
    assert request.param in QUICK, "the study has no row in QUICK"
    pytest.importorskip(QUICK[request.param].needs, reason="an extra is not installed")
    return str(request.param)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The files that the run of a study reads, written once."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            (made[name] / "own.py").write_text(OWN)
            prepare = QUICK[name].prepare
            if prepare is not None:
                prepare(made[name])
        return made[name]

    return of


@pytest.fixture(autouse=True)
def home(
    name: str,
    files: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hasty: None,
    undrawn: None,
) -> Path:
    """The working folder of a run without drawings, whose rounds end after milliseconds."""
    shutil.copytree(files(name), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_help_begins_with_the_summary_and_lists_every_flag(name):
    code, text, _ = command(*name.split(), "--help-all")
    study, out = study_of(name), " ".join(text.split())
    shown = [*study.parameters()]
    assert code == 0 and study.summary in out and max(map(len, text.splitlines())) <= 100
    assert all(one.option.argument or f"{one.flag} " in out for one in shown)
    assert all(one.option.help in out for one in shown)


def test_json_is_one_document_on_stdout_and_the_folder_and_progress_go_to_stderr(name):
    code, out, err = run(name, "--json", "-", "--out", "out")
    document = json.loads(out)
    assert code == 0 and set(document) == {"environment", "records", "sentences", "notes", "interrupted"}
    assert document["environment"]["study"] == study_of(name).name and len(document["records"]) > 1
    assert err.splitlines()[-1] == "out"


@ONE_OF_ALL
def test_a_run_prints_tables_then_its_folder(name):
    code, out, err = run(name, "--out", "first")
    assert code == 0 and len(out.splitlines()) > 3 and out.splitlines()[-1] == "first" and "left" in err
    assert {"records.jsonl", "environment.json", "command.txt"} <= {
        path.name for path in Path("first").iterdir()
    }


def test_quiet_prints_the_folder_alone(name):
    assert run(name, "-q", "--out", "out") == (0, "out\n", "")


def present():
    """What lies in the current folder; Python compiles a backend's file into a folder of its own."""
    return {*Path().iterdir()} - {Path("__pycache__")}


def test_a_dry_run_lists_the_points_and_measures_nothing(name, monkeypatch):
    monkeypatch.setattr(engine.Engine, "run", lambda self: pytest.fail("measured"))
    before = present()
    code, out, _ = run(name, "--dry-run", "--out", "out")
    assert code == 0 and "points; nothing was run" in out and present() == before


def test_a_folder_that_holds_a_run_is_refused_and_left_as_it_was(name):
    Path("out").mkdir()
    Path("out/records.jsonl").write_text("\n")
    code, out, err = run(name, "--out", "out")
    assert (code, out, err.count("\n")) == (2, "", 1) and "out holds records of another run already" in err
    assert [path.name for path in Path("out").iterdir()] == ["records.jsonl"]


@ONE_OF_ALL
def test_an_interrupted_run_names_what_was_not_tried_and_resumes(name, monkeypatch):
    append = run_folder.append

    def interrupt(path, record):
        append(path, record)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "append", interrupt)
        code, out, err = run(name, "--out", "out")
    file = Path("out/records.jsonl")
    kept = file.read_bytes()
    assert code == 130 and out.splitlines()[-1] == "out" and "Not measured: " in err and kept.endswith(b"\n")
    assert run(name, "--out", "out", "--resume")[0] == 0
    assert file.read_bytes().startswith(kept)
    assert run(name, "--out", "whole")[0] == 0
    assert cases("out") == cases("whole")


@ONE_OF_ALL
def test_a_killed_run_resumes_with_nothing_lost(name):
    words = [*words_of(name), *QUICK[name].selection.split(), "--out", "out"]
    killed = subprocess.run([sys.executable, "-c", KILLED, *words], capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    file = Path("out/records.jsonl")
    (line,) = kept = file.read_bytes().splitlines(keepends=True)
    code, _, err = command(*words, "--resume")
    records = file.read_bytes().splitlines(keepends=True)
    assert code == 0 and records[0] == line and len(records) > len(kept)
    # A study that drops points by its records has more points than records.
    assert f"/{len(cases('out')) - 1}] " in err or name == "advise"


def test_an_unknown_backend_is_refused_with_a_suggestion(name):
    if "--backend" not in flags(name):
        pytest.skip("The study has no option --backend.")
    code, out, err = run(name, "--backend", "windw")
    assert (code, out, err.count("\n")) == (2, "", 1) and "Did you mean 'window'" in err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resume"], "--resume needs --out"),
        (["--json", "file"], "--json takes -"),
        (["--budget", "soon"], "--budget is a duration"),
        (["--out", "own.py"], "--out: cannot write to own.py"),
        (["--out", "/proc/nowhere"], "--out: cannot write to /proc/nowhere"),
        (["--no-such-flag"], "No such option: --no-such-flag"),
        (["stray"], "'stray' stands alone"),
        (["--backend", " ,"], "--backend ' ,' names nothing"),
        (["--backend", "own.py:absent"], "absent"),
        (["--set", "window.size=5"], "No option of backend 'window' is called 'size'"),
        (["--set", "window=5"], "--set cannot be 'window=5'"),
        (["--threads", "100000"], "threads is at most"),
        (["--seq-len", "many"], "--seq-len"),
        (["--seq-len", "0"], "--seq-len"),
        (["--device", "tpu"], "device is auto, cpu, cuda"),
        (["--dtype", "int8"], "dtype is auto"),
        (["--seed", "-1"], "--seed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_request_is_one_line_with_code_2_and_writes_nothing(name, words, message):
    of_every_run = {"--resume", "--json", "--budget", "--out", "--no-such-flag", "stray"}
    if words[0] not in of_every_run | {*flags(name)}:
        pytest.skip(f"The study has no option {words[0]}.")
    if "window.size=5" in words and "window" not in QUICK[name].selection:
        pytest.skip("The run has no window.")
    before = present()
    code, out, err = run(name, *words)
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("error: ") and message in err
    assert present() == before


@ONE_OF_ALL
def test_the_exit_code_reports_failed_backends(name):
    for backends, code in QUICK[name].codes.items():
        assert run(name, "-q", "--backend", backends)[0] == code
