"""`efficient-attn recall`: table, files, refusals and exit codes of its own options."""

import pytest

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from efficient_attn.measure.record import Record
from efficient_attn.studies import results as drawn
from efficient_attn.studies.recall import measure as recall_training
from efficient_attn_cli.main import main

TASK = ["--pairs", "8", "--classes", "4", "--queries", "4", "--gap", "4"]
TINY = [
    "recall",
    *TASK,
    "--steps",
    "1",
    "--seeds",
    "1",
    "--size",
    "4",
    "--head-dim",
    "8",
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def untrained(monkeypatch):
    """Nothing is trained and nothing drawn, which takes longer than everything else of so small a run."""
    monkeypatch.setattr(drawn, "write_all", lambda runs, folder, look: [])

    def measure(case, target, course):
        if case.backend == "linformer" and case.causal:
            return Record(case=case, status="unsupported", reason="it cannot be causal")
        return Record(case=case, accuracy=0.5, answers=8, chance=0.25, times_s=(0.001,))

    monkeypatch.setattr(recall_training, "measure", measure)


def command(*words):
    """The exit code of the command."""
    with pytest.raises(SystemExit) as exit_:
        main(list(words))
    return exit_.value.code


def test_it_prints_a_table_sentences_and_the_folder_with_all_its_files(folder, capsys):
    assert command(*TINY, "--backend", "performer-positive") == 0
    *lines, last = capsys.readouterr().out.splitlines()
    for name in ("exact", "uniform attention", "window(window=9)", "performer-positive(num_features=4)"):
        assert len([line for line in lines if line.startswith(f" {name} ")]) == 1
    assert any("exact attention is right in" in line for line in lines)
    assert last.startswith("runs/recall-")
    written = {path.name for path in (folder / last).iterdir()}
    assert written >= {"records.jsonl", "report.html", "summary.csv", "recall.png"}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--causal"], 0),
        (["--causal", "--backend", "linformer"], 3),
    ],
)
def test_it_ends_with_the_code_that_says_how_it_went(words, code, untrained):
    assert command(*TINY, *words) == code


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pairs", "9"], "pairs=9 is no multiple of classes=4"),
        (["--steps", "0"], "steps is at least 1, not 0"),
        (["--seeds", "0"], "seeds is at least 1, not 0"),
        (["--steps", "many"], "'--steps': Input should be a valid integer"),
        (["--size", "few"], "--size cannot be 'few'"),
        (["--size", "1.5"], "--size cannot be '1.5'"),
    ],
)
def test_a_wrong_request_is_one_line_and_writes_nothing(folder, words, message, capsys):
    assert command(*TINY, *words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (folder / "runs").exists()
