"""`efficient-attn swap`: what they print and write, what they refuse, and how they end."""

import json

import pytest

pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")
pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from integrations.hf_models import bert, saved, texts

from efficient_attn.studies import results as drawn
from efficient_attn_cli.main import main


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved(bert(), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where the command runs, with texts; nothing is drawn or timed at length."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(drawn, "write_all", lambda runs, folder, look: [])
    monkeypatch.setattr("efficient_attn.studies.engine._ROUND_S", 0.0)
    for number, text in enumerate(texts().values()):
        (tmp_path / f"{number}.txt").write_text(text)
    return tmp_path


def command(*words):
    """The exit code of the command."""
    with pytest.raises(SystemExit) as exit_:
        main([str(word) for word in words])
    return exit_.value.code


def tiny(model, *words):
    return command("swap", model, "--text", "0.txt", "--text", "1.txt", "--rounds", 1, "--draws", 2, *words)


def test_it_prints_tables_sentences_and_the_folder(model, folder, capsys):
    asked = ["--backend", "window,performer-positive", "--set", "window.window=3,9", "--by", "layer"]
    assert tiny(model, *asked, "--seq-len", 20) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"Attention swapped: {model.name} on 2 texts #") and "; 20 tokens" in lines[0]
    for name in ("the model's own", "exact", "uniform attention", "window(window=3)", "performer-positive"):
        assert any(line.startswith(f" {name} ") for line in lines)
    assert last.startswith("runs/swap-") and (folder / last / "records.jsonl").is_file()
    environment = json.loads((folder / last / "environment.json").read_text())
    assert set(environment["model"]["texts"]) == {"0.txt", "1.txt"}
    assert str(folder) not in json.dumps(environment)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seq-len", "60"], "The text '0.txt' has 42 tokens, fewer than seq_len=60"),
        (["--by", "head"], "--by is layer, not 'head'"),
        (["--text", "absent.txt"], "--text: cannot read absent.txt"),
        (["--text", "./0.txt"], "two files are called '0.txt'"),
        (["--set", "window.window=4", "--backend", "window"], "window=4"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(model, words, message, capsys):
    assert tiny(model, *words) == 2
    told = capsys.readouterr().err
    assert message in told and told.startswith("error: ") and told.count("\n") == 1


def test_swap_saves_a_file_that_show_reads(model, folder, capsys):
    asked = ["swap", model, "--text", "0.txt", "--backend", "exact", "--draws", "1", "--rounds", "1"]
    assert command(*asked, "--save", "a.safetensors", "--layers", 1, "--out", "run") == 0
    assert "Saved layers 1 on" in capsys.readouterr().err
    assert command("show", "--inputs", "a.safetensors", "--backend", "window", "--head", 1) == 0
