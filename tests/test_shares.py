"""Shares of a run: a partition of its points whose records read as one run."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from made_records import case

import efficient_attn as ea
from efficient_attn.errors import DataError, OptionError
from efficient_attn.runner.record import Record
from efficient_attn.runner.record import replace as changed
from efficient_attn.studies import find, report
from efficient_attn.studies.plan import Plan, Point
from efficient_attn.studies.recall import measure as recall_training
from efficient_attn.studies.run_folder import RECORDS
from efficient_attn.studies.shard import SHARD, by_run, missing, share_of

pytestmark = pytest.mark.usefixtures("undrawn")

MSE = {"inputs": "gaussian", "seq_len": 24, "head_dim": 4, "sizes": (4, 8), "draws": 2, "threads": 1}
RECALL = {"pairs": 4, "classes": 2, "queries": 2, "gap": 4, "steps": 1, "seeds": 1, "sizes": (4,), "batch": 2,
          "head_dim": 4, "threads": 1}  # fmt: skip
SMALL = {"mse": MSE, "recall": RECALL}
BACKENDS = ["window", "linformer", "performer-positive"]
EMPTY = "1/999983"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def equal_times(monkeypatch):
    """Trainings whose steps last as long in every run."""
    measure = recall_training.measure

    def timed(*given):
        return changed(measure(*given), times_s=(0.001,))

    monkeypatch.setattr(recall_training, "measure", timed)


def run(name="mse", **more):
    return getattr(ea, name)(BACKENDS, **{**SMALL[name], **more})


def shares(name="mse", of=2, home="share"):
    """The folders of all shares."""
    for number in range(1, of + 1):
        run(name, shard=(number, of), out=f"{home}-{number}")
    return [f"{home}-{number}" for number in range(1, of + 1)]


def keys(points):
    return [point.case.key for point in points]


@pytest.mark.parametrize("of", [1, 2, 3, 8])
@pytest.mark.parametrize("name", SMALL)
def test_shares_are_disjoint_and_their_union_is_the_whole(name, of):
    whole = find(name).plan(BACKENDS, **SMALL[name])
    parts = [share_of(whole, f"{number}/{of}") for number in range(1, of + 1)]
    together = [key for part in parts for key in keys(part.points)]
    assert sorted(together) == sorted(keys(whole.points)) and len(set(together)) == len(together) > 5
    # Each share has the order of the plan.
    assert all(keys(part.points) == [key for key in keys(whole.points) if key in keys(part.points)]
               for part in parts)  # fmt: skip


def test_a_machine_with_other_threads_has_the_same_shares():
    one, two = (
        share_of(find("mse").plan(BACKENDS, **{**MSE, "threads": threads}), "1/3") for threads in (1, 2)
    )
    assert [replace(point.case, threads=1) for point in two.points] == [point.case for point in one.points]
    assert one.about[SHARD] == two.about[SHARD]


@pytest.mark.parametrize("name", SMALL)
def test_two_shares_give_the_report_of_one_run(name, monkeypatch):
    whole = run(name, out="whole")
    folders = shares(name)
    for order in (folders, folders[::-1]):
        joined = ea.read(*order)
        assert 0 < len(ea.read(order[0])) < len(joined)
        assert joined.records == whole.records and joined.notes == ()
        assert joined.tables() == whole.tables() and joined.sentences() == whole.sentences() != []
        assert joined.environment.keys() >= {"study", "torch"} and SHARD not in joined.environment
    joined.save("joined")
    assert ea.read("joined").records == whole.records and ea.read("joined").notes == ()
    pages = []
    monkeypatch.setattr(report, "write_page", lambda runs, path, look: pages.append(runs))
    report.report(*folders, html="page.html")
    ((page,),) = pages
    assert page.tables == whole.tables() and page.sentences == whole.sentences()


def test_diff_joins_shares_and_counts_repetitions_of_all_of_them():
    run(out="whole")
    once, again = shares(home="once"), shares(home="again")
    found = ea.diff(once, ["whole"]).comparison
    assert found.runs == (1, 1) and found.missing == found.added == () and found.changes
    assert ea.diff([*once, *again], ["whole"]).comparison.runs == (2, 1)
    assert ea.diff(once[0], "whole").comparison.added
    measured = [run(shard=(number, 2)) for number in (1, 2)]
    found = ea.diff(measured, "whole")
    assert found.comparison.runs == (1, 1) and not any("lack shares" in one for one in found.warnings)


def test_shares_of_other_runs_are_not_joined():
    run(shard="1/2", out="one")
    run(sizes=(4,), shard="2/2", out="two")
    assert ea.read("one", "two").environment == {} != ea.read("one").environment


def test_missing_shares_are_named():
    folders = shares(of=3)
    assert "Tables and sentences lack shares of the run: 2/3." in ea.read(folders[0], folders[2]).notes
    assert any("shares of the run: 2/3, 3/3." in note for note in ea.read(folders[0]).notes)


def timed(tokens, **more):
    asked = case("time", "window", tokens)
    return Point(case=asked, measure=lambda seconds: Record(case=asked), rounds=2, **more)


@pytest.mark.parametrize("of", [2, 8])
def test_timed_points_are_all_in_one_share(of):
    plan = Plan(points=[timed(tokens, group=tokens) for tokens in range(1, 40)])
    counts = [len(share_of(plan, (number, of)).points) for number in range(1, of + 1)]
    assert sorted(counts) == [0] * (of - 1) + [39]


def test_a_condition_on_a_case_holds_within_its_share_alone():
    asked = [case("error", "window", tokens) for tokens in range(1, 40)]
    needed, *others = [Point(case=one, measure=lambda: None, needs=asked[0]) for one in asked]
    plan = Plan(points=[replace(needed, needs=None), *others])
    parts = [share_of(plan, (number, 2)).points for number in (1, 2)]
    (own,), (other,) = ({point.needs for point in part if point.case != asked[0]} for part in parts)
    assert {own, other} == {asked[0], None}
    assert asked[0] in [point.case for point in parts[0 if own else 1]]


def test_a_share_is_resumed_and_no_other_one_in_its_folder():
    first = run(shard="1/2", out="out")
    file = Path("out", RECORDS)
    kept = file.read_text().splitlines(keepends=True)
    file.write_text("".join(kept[:-1]))
    assert run(shard="1/2", out="out", resume=True).records == first.records
    assert sorted(file.read_text().splitlines(keepends=True)) == sorted(kept)
    for other, named in (("2/2", "share 2/2"), ("1/3", "share 1/3"), (None, "a whole run")):
        with pytest.raises(
            DataError, match=f"out holds share 1/2, not {named}; continue that, or name a new"
        ):
            run(shard=other, out="out", force_resume=True)


@pytest.mark.parametrize("bad", [(0, 4), (1,), (1, 2.0), (True, 2), 1.5, 8])
def test_a_share_is_a_pair_of_whole_numbers(bad):
    with pytest.raises(OptionError, match="shard is I/N with I from 1 to N, such as 2/8, not"):
        run(shard=bad)


@pytest.mark.parametrize(
    "entry",
    [
        1,
        "1/2",
        {},
        {"share": "1/2"},
        {"share": [], "cases": ""},
        {"share": "0/2", "cases": ""},
        {"cases": "0"},
    ],
)
def test_an_entry_of_somebody_else_makes_no_share(entry):
    environments = [{"study": "mse", SHARD: entry}] * 2
    assert by_run(environments) == [[0], [1]] and missing(environments) == []
    halves = [{"study": entry, SHARD: {"share": f"{number}/2", "cases": ""}} for number in (1, 2)]
    assert by_run(halves) == [[0, 1]] and missing(halves) == []
