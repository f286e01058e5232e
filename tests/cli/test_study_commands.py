"""The command of every study: help, JSON, dry run, folder, resume, refusals and exit codes."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from command_line import command

from efficient_attn.measure.record import read
from efficient_attn.runs import engine, store
from efficient_attn.runs.registry import find, studies

# The quickest run of every study that has two points or more, without its selection of backends.
# A study that is added gets a row here; all promises below hold for it.
QUICK = {
    "advise": "tiny --text text.txt --text second.txt --seq-len 16 --rounds 1 --min-cosine 1",
    "bench": "--seq-len 16 --num-heads 2 --head-dim 8 --rounds 1",
    "mse": "--inputs gaussian --seq-len 24 --head-dim 4 --size 4,8 --norm 0.5 --draws 2",
    "recall": "--pairs 16 --steps 1 --seeds 1 --size 4",
    "swap": "tiny --text text.txt --draws 1 --rounds 1",
}
# Exit code of a run by its backends. The baselines of recall are measured with every backend.
CODES = {name: {"exact,own.py:broken": 3, "own.py:broken": 4} for name in QUICK}
CODES["recall"] = {"own.py:broken": 4, "own.py:mean": 0}

OWN = """
def mean(q, k, v):
    return v.mean(dim=-2, keepdim=True).expand_as(v)


def broken(q, k, v):
    raise RuntimeError("it broke here")
"""


def flags(name: str) -> list[str]:
    return [option.metadata["flag"] or f"--{option.name}" for option, _ in find(name).declared()]


def run(name: str, *more: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the quickest run with more options."""
    selection = [] if "--backend" in more else ["--backend", "window"]
    selection += ["--set", "window.window=3"] if selection and name == "recall" else []
    # As many threads as the tests have.
    threads = ["--threads", "1"] if "--threads" in flags(name) else []
    return command(name, *QUICK[name].split(), *threads, *selection, *more)


def cases(folder: str) -> set[str]:
    return {record.case.key for record in read(Path(folder, "records.jsonl")).records}


# One study stands for all in the quick tests; the slow tests have the others.
SLOW = {"marks": pytest.mark.slow}


@pytest.fixture(params=["bench", *(pytest.param(one, **SLOW) for one in sorted({*studies()} - {"bench"}))])
def name(request: pytest.FixtureRequest) -> str:
    assert request.param in QUICK, "the study has no row in QUICK"
    if QUICK[request.param].startswith("tiny"):
        pytest.importorskip("transformers", reason="an extra is not installed")
    return str(request.param)


@pytest.fixture(autouse=True)
def home(name, request, tmp_path, monkeypatch, hasty, unisolated, undrawn):
    """The working folder of a run without drawings, whose rounds end after milliseconds."""
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    if QUICK[name].startswith("tiny"):
        from hf_models import texts

        if name == "advise":
            # Its times decide which points follow.
            request.getfixturevalue("given_times")
        shutil.copytree(request.getfixturevalue("encoder"), "tiny")
        for file, text in zip(("text.txt", "second.txt"), texts().values(), strict=False):
            Path(file).write_text(text)


def test_the_help_begins_with_the_summary_and_lists_every_flag(name):
    code, text, _ = command(name, "--help-all")
    study, out = find(name), " ".join(text.split())
    assert code == 0 and study.__doc__.partition("\n")[0] in out and max(map(len, text.splitlines())) <= 100
    for option, _ in study.declared():
        assert option.metadata["help"] in out
    shown = {flag.replace("_", "-") for flag in flags(name)} - {"--model"}
    assert shown <= set(re.findall(r"--[\w-]+", out))


def test_json_is_one_document_on_stdout_and_quiet_prints_the_folder_alone(name):
    assert run(name, "-q", "--out", "quiet") == (0, "quiet\n", "")
    code, out, err = run(name, "--json", "--out", "out")
    document = json.loads(out)
    assert code == 0 and set(document) == {"environment", "records", "sentences", "notes", "interrupted"}
    assert document["environment"]["study"] == name and len(document["records"]) > 1
    assert err.splitlines()[-1] == "out"


def present():
    """Files of the current folder, but for a backend that Python compiled."""
    return {*Path().iterdir()} - {Path("__pycache__")}


def test_a_dry_run_lists_the_points_and_measures_nothing(name, monkeypatch):
    monkeypatch.setattr(engine.Engine, "run", lambda self: pytest.fail("measured"))
    before = present()
    code, out, _ = run(name, "--dry-run", "--out", "out")
    assert code == 0 and "points; nothing was run" in out and present() == before
    Path("out").mkdir()
    Path("out/records.jsonl").write_text("\n")
    code, out, err = run(name, "--out", "out")
    assert (code, out, err.count("\n")) == (2, "", 1) and "out holds records of another run already" in err
    assert [path.name for path in Path("out").iterdir()] == ["records.jsonl"]


def test_an_interrupted_run_names_what_was_not_tried_and_resumes(name, monkeypatch):
    append = store.append

    def interrupt(path, record):
        append(path, record)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(store, "append", interrupt)
        code, out, err = run(name, "--out", "out")
    file = Path("out/records.jsonl")
    kept = file.read_bytes()
    assert (code, Path(out.splitlines()[-1]).parts[0]) == (130, "out")
    assert "points were not measured" in err and kept.endswith(b"\n")
    # The printed command goes on with the options that the run stored.
    (line,) = (line for line in out.splitlines() if line.startswith("Continue: "))
    assert "--out FOLDER --resume" in err and command(*line.split()[2:])[0] == 0
    assert file.read_bytes().startswith(kept)
    assert run(name, "--out", "whole")[0] == 0
    assert cases("out") == cases("whole")


@pytest.mark.parametrize("name", ["bench"], indirect=True)
def test_the_first_line_has_the_time_of_work_beside_busy_processes(name, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for others_share, words in ((1.0, "; at this load about 1 min of work."), (0.1, ".")):
        path = "efficient_attn.measure.environment.between"
        monkeypatch.setattr(path, lambda *moments, share=others_share: {"others_share": share})
        _, _, err = run(name, "--budget", "90s")
        # One thread beside two busy processes on two cores has two thirds of one core.
        assert f"points, at most 1.5 min (--budget){words}\n" in err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["advise"], indirect=True)
def test_a_bound_that_excludes_all_plans_is_a_result(name, monkeypatch):
    monkeypatch.setattr("efficient_attn.studies.advise.model.excludes", lambda bound: True)
    assert run(name)[0] == 0 and run(name, "--backend", "own.py:broken")[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resume"], "--resume needs --out"),
        (["--budget", "soon"], "--budget is a duration"),
        (["--out", "own.py"], "--out: cannot write to own.py"),
        (["--no-such-flag"], "No such option: --no-such-flag"),
        (["--backend", " ,"], "--backend ' ,' names nothing"),
        (["--backend", "own.py:absent"], "absent"),
        (["--backend", "windw"], "Did you mean 'window'"),
        (["--set", "window.size=5"], "No option of backend 'window' is called 'size'"),
        (["--threads", "100000"], "threads is at most"),
        (["--device", "tpu"], "device is auto, cpu, cuda"),
        (["--seed", "-1"], "--seed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_request_is_one_line_with_code_2_and_writes_nothing(name, words, message):
    of_every_run = {"--resume", "--json", "--budget", "--out", "--no-such-flag"}
    if words[0] not in of_every_run | {*flags(name)}:
        pytest.skip(f"The study has no option {words[0]}.")
    before = present()
    code, out, err = run(name, *words)
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("error: ") and message in err
    assert present() == before


def test_the_exit_code_reports_failed_backends(name):
    for backends, code in CODES[name].items():
        assert run(name, "-q", "--backend", backends)[0] == code
