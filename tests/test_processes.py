"""Commands and studies under a launcher of several processes."""

import pytest

import efficient_attn as ea

SMALL = {"inputs": "gaussian", "seq_lens": 16, "sizes": (8,), "draws": 2}


@pytest.fixture(autouse=True)
def in_two_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")


@pytest.mark.parametrize("words", ["mse", "bench", "report runs", "list"])
def test_commands_in_several_processes_are_refused_in_one_line(words, capsys):
    main = pytest.importorskip("efficient_attn_cli.main", reason="needs an installation")
    assert main._run(words.split()) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_other_processes_are_silent_where_a_command_is_refused(monkeypatch, capsys):
    main = pytest.importorskip("efficient_attn_cli.main", reason="needs an installation")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit, match="2"):
        main._run(["mse"])
    assert capsys.readouterr() == ("", "")


def test_a_study_that_writes_no_folder_runs_in_every_process(tmp_path):
    assert len(ea.mse(["performer-positive"], **SMALL).records)
    with pytest.raises(ea.UnsupportedError, match="mse runs in one process, and WORLD_SIZE is 2"):
        ea.mse(["performer-positive"], out=tmp_path / "run", **SMALL)
    assert not (tmp_path / "run").exists()
