"""`--shard`: its run and its refusals."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from quick_runs import command

import efficient_attn as ea
from efficient_attn.studies import report
from efficient_attn.studies.run_folder import RECORDS

pytestmark = pytest.mark.usefixtures("undrawn")

MSE = "mse --backend window --inputs gaussian --seq-len 24 --head-dim 4 --size 4,8 --draws 2"
# A share that has most likely none of the points of a run.
EMPTY = "1/999983"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_report_of_shares_has_all_commands_and_the_plan_of_the_whole(monkeypatch):
    for number in (1, 2):
        given = [*MSE.split(), "--shard", f"{number}/2", "--out", f"share-{number}"]
        monkeypatch.setattr(sys, "argv", ["efficient-attn", *given])
        assert command(*given)[0] == 0
    assert 'shard = "2/2"' in Path("share-2/plan.toml").read_text()
    pages = []
    monkeypatch.setattr(report, "write_page", lambda runs, path, look: pages.append(runs))
    report.report("share-1", "share-2", html="page.html")
    ((page,),) = pages
    first, second = page.command.splitlines()
    assert "--shard 1/2" in first and "--shard 2/2" in second and page.label == "share-1 to share-2"
    assert "shard" not in page.plan and 'size = "4,8"' in page.plan


def test_a_dry_run_of_a_share_shows_how_many_points_every_share_has():
    code, out, _ = command(*MSE.split(), "--shard", "2/3", "--dry-run")
    rows = [line.split() for line in out[out.index(" points of 3 shares") :].splitlines()]
    points = {row[0]: int(row[1]) for row in rows if row and row[0].endswith("/3")}
    whole = command(*MSE.split(), "--dry-run")[1]
    assert code == 0 and f"{sum(points.values())} points; nothing was run" in whole
    assert f"{points.get('2/3', 0)} points; nothing was run" in out
    assert [row[0] for row in rows if row[-2:] == ["this", "one"]] == ["2/3"]


def test_a_share_without_points_ends_well_and_is_read_with_the_others():
    code, out, err = command(*MSE.split(), "--shard", EMPTY, "--out", "none")
    assert code == 0 and out.splitlines()[-1] == "none" and "lack shares of the run: 2/999983" in err
    assert Path("none", RECORDS).read_text() == "" and len(ea.read("none")) == 0
    command(*MSE.split(), "--out", "other")
    assert len(ea.read("none", "other")) == len(ea.read("other"))


@pytest.mark.parametrize("bad", ["0/4", "5/4", "a/b", "1/0", "1/2/3", "2", ""])
def test_a_wrong_share_is_refused_in_one_line(bad, folder):
    code, out, err = command("mse", "--inputs", "gaussian", "--seq-len", "24", "--shard", bad)
    assert (code, out, err.count("\n")) == (2, "", 1) and list(folder.iterdir()) == []
    assert "--shard is I/N with I from 1 to N, such as 2/8, not" in err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("bench --seq-len 16", "bench interleaves the timing rounds of all backends on one machine"),
        ("compare --inputs gaussian --seq-len 16 --isolate none", "mse can be shared out"),
    ],
)
def test_a_study_whose_points_belong_together_refuses_shares(words, reason, folder):
    code, out, err = command(*words.split(), "--shard", "1/2")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert list(folder.iterdir()) == []
    assert "--shard 1/2: " in err and reason in err
