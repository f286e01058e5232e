"""`efficient-attn reproduce`: what it lists, writes, refuses, and with which code it ends."""

from pathlib import Path

import pytest

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from efficient_attn_cli.main import main


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", *arguments])
    return int(ended.value.code or 0)


def test_without_a_figure_all_are_listed_with_their_papers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    printed = capsys.readouterr().out
    assert "vaswani-table1" in printed and "https://arxiv.org/abs/1706.03762" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vaswani-table2"], "vaswani-table1"),
        (["vaswani-table1", "--budget", "soon"], "--budget is a duration"),
        (["vaswani-table1", "--threads", "4096", "--out", "run"], "threads is at most"),
    ],
)
def test_a_wrong_request_ends_in_one_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    written = capsys.readouterr().err
    assert message in written and len(written.splitlines()) == 1


@pytest.mark.slow
def test_a_figure_is_printed_with_its_verdicts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ("--quick", "--threads", "1", "--budget", "20s", "--out", str(out))
    assert run("vaswani-table1", *options) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == str(out)
    assert printed.count("Measured: ") == 9
    assert (out / "vaswani-table1.svg").exists() and (out / "verdicts.md").exists()
