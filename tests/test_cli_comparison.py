"""`efficient-attn bench --inputs`: output, files, refusals and exit codes."""

import json

import pytest

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from efficient_attn_cli.main import main

pytestmark = pytest.mark.usefixtures("hasty", "unisolated")

TINY = ["bench", "--inputs", "encoder", "--seq-len", "24", "--rounds", "1"]
OWN = """
def mean(q, k, v):
    return v.mean(dim=-2, keepdim=True).expand_as(v)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def command(*words):
    """The exit code of the command."""
    with pytest.raises(SystemExit) as exit_:
        main(list(words))
    return exit_.value.code


def test_it_prints_one_table_one_sentence_and_the_folder_with_all_its_files(folder, capsys):
    asked = ["--backend", "linformer,own.py:mean", "--set", "linformer.rank=9"]
    assert command(*TINY, *asked) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("On this machine")] == [lines[-1]]
    assert "at 24 tokens (encoder, layers 0, 1, 5)" in lines[-1]
    for name in ("exact", "linformer(rank=9)", "own.py:mean", "uniform attention"):
        assert len([line for line in lines if line.startswith(f" {name} ")]) == 1
    assert last.startswith("runs/bench-")
    written = {path.name for path in (folder / last).iterdir()}
    assert written >= {"records.jsonl", "report.html", "summary.csv", "comparison.png"}
    assert "own.py:mean" in (folder / last / "report.html").read_text()


def test_json_is_one_document(undrawn, capsys):
    asked = ["--backend", "own.py:mean", "--max-error", "0.2"]
    assert command(*TINY, *asked, "--out", "out", "--json", "-") == 0
    document = json.loads(capsys.readouterr().out)
    assert {record["inputs"] for record in document["records"]} == {
        "encoder(layers=0,1,5)",
        *(f"encoder(layer={layer})" for layer in (0, 1, 5)),
    }
    assert document["environment"]["max_error"] == 0.2 and "within 20 %" in document["sentences"][0]
    assert set(document) == {"environment", "records", "sentences", "notes", "interrupted"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seq-len", "5k"], "5120 tokens are more than the 512 of encoder"),
        (["--max-error", "0"], "max_error is a finite number above 0"),
        (["--max-error", "little"], "--max-error"),
        (["--inputs", "own.py"], "is not a valid safetensors file"),
    ],
)
def test_a_wrong_request_is_one_line_and_writes_nothing(folder, words, message, capsys):
    assert command(*TINY, *words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (folder / "runs").exists()
