"""`efficient-attn mse`: what they print, write, refuse, and with which code they end."""

import json
from pathlib import Path

import pytest

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from planned import points_of

from efficient_attn import studies
from efficient_attn_cli.main import main

SMALL = [
    "mse",
    "--inputs",
    "gaussian",
    "--seeds",
    "1",
    "--seq-len",
    "24",
    "--head-dim",
    "4",
    "--size",
    "4,8",
    "--norm",
    "0.5",
]
OWN = """
def mean(q, k, v):
    return v.mean(dim=-2, keepdim=True).expand_as(v)

"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "bad.safetensors").write_bytes(b"no safetensors")
    (tmp_path / "text.txt").write_text("some words")
    (tmp_path / "model").mkdir()
    return tmp_path


def command(*words):
    """The exit code of the command."""
    with pytest.raises(SystemExit) as exit_:
        main([str(word) for word in words])
    return exit_.value.code


def unfolded(text):
    """The text with its lines joined: titles are folded to the width of their table."""
    return " ".join(text.split())


def test_mse_prints_tables_and_sentences_and_last_the_folder_of_its_files(folder, capsys):
    assert command(*SMALL, "--draws", "2", "--norm", "0.5,1") == 0
    out, err = capsys.readouterr()
    assert "Relative output error: gaussian, norm 0.5; 24 tokens, 1 head of 4" in unfolded(out)
    assert "uniform attention" in out
    assert "Below uniform attention on" in out
    assert "Relative output error" not in err
    last = out.splitlines()[-1]
    assert last.startswith("runs/mse-")
    written = {path.name for path in (folder / last).iterdir()}
    assert written >= {
        "records.jsonl",
        "environment.json",
        "command.txt",
        "summary.csv",
        "error.png",
        "error.svg",
    }


def test_mse_measures_the_shipped_encoder(capsys):
    assert (
        command("mse", "--inputs", "encoder", "--layers", "1", "--backend", "exact,window", "--size", "32")
        == 0
    )
    out = unfolded(capsys.readouterr().out)
    assert "encoder, layer 1; 512 tokens, 12 heads of 32" in out
    assert (
        "Below uniform attention on every input, with fewer operations than exact: window from size 33."
        in out
    )


def test_mse_measures_a_function_in_a_file(capsys):
    assert command(*SMALL, "--backend", "own.py:mean", "--json", "-") == 0
    records = json.loads(capsys.readouterr().out)["records"]
    yardstick, own = (records[i]["output_relative_error"] for i in (0, -1))
    # The same mean, once in float64 and once in float32.
    assert own == pytest.approx(yardstick, rel=1e-5)


def test_mse_sets_options_and_writes_where_it_is_told(capsys):
    asked = ["--backend", "linformer", "--set", "linformer.init=gaussian", "--out", "here"]
    assert command(*SMALL, *asked) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "here"
    labels = [json.loads(line)["label"] for line in Path("here/records.jsonl").read_text().splitlines()]
    assert labels[-2:] == [f"linformer(init=gaussian, rank={rank})" for rank in (4, 8)]


def test_the_predicted_duration_weighs_points_by_their_operations():
    asked = {"inputs": "gaussian", "norms": (1.0,), "seq_lens": 512, "head_dim": 4, "sizes": (16, 64)}
    plan = studies.find("mse").plan(["performer-positive", "exact"], **asked)
    costs = {point.case.label: point.cost for point in points_of(plan)}
    small, large = (costs[f"performer-positive(num_features={size})"] for size in (16, 64))
    assert small < large < 4 * small
    assert len({point.series for point in points_of(plan)}) < len(points_of(plan))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size", "many"], "--size cannot be 'many'"),
        (["--size", "0"], "--size cannot be '0'"),
        (["--size", "64:16:x2"], "--size 64:16:x2 never grows"),
        (["--norm", "0"], "--norm is made of finite numbers above 0, such as 0.5,1, not '0'"),
        (["--norm", "small"], "--norm is made of finite numbers above 0, such as 0.5,1, not 'small'"),
        (["--norm", "inf"], "--norm is made of finite numbers above 0, such as 0.5,1, not 'inf'"),
        (["--layers", "first"], "--layers is made of whole numbers, such as 0,1,5, not 'first'"),
        (["--inputs", "encoder", "--layers", "2"], "layer 2 is not in encoder; it has 0, 1, 5."),
        (["--inputs", "images"], "inputs cannot be 'images': there is no such file."),
        (["--inputs", ","], "',' names nothing"),
        (
            ["--inputs", "bad.safetensors"],
            "bad.safetensors is not a valid safetensors file: it has no header. Make one with",
        ),
        (["--metric", "accuracy"], "No metric is called 'accuracy'. Known: mse, relative"),
        (["--backend", "rff"], "Here it is 'performer-trig'."),
        (["--set", "linformer.ranks=4"], "Did you mean 'rank'?"),
        (["--set", "linformer.rank=25"], "rank=25 is more than max_tokens=24"),
    ],
)
def test_a_wrong_request_ends_in_one_line_and_code_2(words, message, capsys):
    assert command(*SMALL, *words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert not Path("runs").exists()
