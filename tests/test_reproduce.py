"""Figures of papers measured again: how a verdict is found, and what a folder holds."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from ideal_table1 import table_1

import efficient_attn as ea
from efficient_attn.errors import UnknownNameError
from efficient_attn.report.escape import markdown_cell
from efficient_attn.stats import verdicts
from efficient_attn.stats.verdicts import FAILS, HOLDS, NOT_MEASURABLE
from efficient_attn.studies.reading import read
from efficient_attn.studies.reproduce import figures
from efficient_attn.studies.reproduce.view import findings
from efficient_attn.studies.results import Results


def test_a_statement_about_several_places_holds_fails_or_turns_round() -> None:
    assert verdicts.of_all({"a": True, "b": True}) == HOLDS
    assert verdicts.of_all({"a": False, "b": False}) == FAILS
    assert verdicts.of_all({"a": True, "b": False, "c": None}) == "turns round when b"
    assert verdicts.of_all({"a": True, "b": None}) == f"{HOLDS}; too noisy to tell at b"
    assert verdicts.of_all({}) == verdicts.of_all({"a": None}) == NOT_MEASURABLE


def test_a_cost_is_less_only_if_the_intervals_say_so() -> None:
    slow, fast, wide, even = (
        replace(table_1()[-1], times_s=times, round_sizes=(1,) * 8)
        for times in ((3.0,) * 8, (1.0,) * 8, (0.5, 5.0) * 4, (2.0, 3.0) * 4)
    )
    assert verdicts.costs_less(fast, slow) is True
    assert verdicts.costs_less(slow, fast) is verdicts.costs_less(fast, fast) is False
    assert verdicts.costs_less(wide, fast) is verdicts.costs_less(even, wide) is None


def test_costs_proportional_to_an_order_may_differ_by_one_percent() -> None:
    assert verdicts.proportional([2, 4], [1, 2]) and not verdicts.proportional([2, 4.1], [1, 2])


def test_missing_points_are_counted_and_the_first_has_its_reason() -> None:
    records = [replace(record, status="skipped", reason="no time") for record in table_1() if record.times_s]
    (whole,) = verdicts.not_measured([*table_1(), *records])
    assert (
        whole
        == f"time: {len(records)} points skipped, the first of them self-attention at 64 tokens: no time"
    )


def test_figures_are_found_by_the_names_of_their_files() -> None:
    assert "vaswani-table1" in figures.list_figures()
    for name in figures.list_figures():
        assert "_" not in name
        figure = figures.find(name)
        assert figure.TITLE and "https://" in figure.PAPER
    with pytest.raises(UnknownNameError, match=r"'vaswani-table2'.*vaswani-table1"):
        figures.find("vaswani-table2")


RUNS = sorted((Path(__file__).parent.parent / "results").glob("*/reproduce-*"))


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_the_verdicts_of_a_reference_run_follow_from_its_records(run: Path) -> None:
    name, kept = run.name.removeprefix("reproduce-"), read(run)
    found = figures.find(name).findings(kept.records)
    assert findings(kept.records, kept.environment) == found and list(kept.plots()) == [name]
    written = (run / "verdicts.md").read_text(encoding="utf-8")
    rows = [" | ".join(map(markdown_cell, finding)) for finding in found]
    assert [row for row in rows if row not in written] == []


def test_the_page_shows_every_reference_run_with_its_figure() -> None:
    page = (RUNS[0].parent.parent.parent / "docs/reproduce.md").read_text(encoding="utf-8")
    assert re.findall(r"```{verdicts} (\S+)", page) == [
        f"reproduce-{name}" for name in re.findall(r"\(images/(\S+)\.png\)", page)
    ]
    assert set(re.findall(r"```{verdicts} (\S+)", page)) == {run.name for run in RUNS}


def test_a_folder_holds_the_figure_and_its_verdicts(tmp_path: Path) -> None:
    made = Results(table_1(), environment={"study": "reproduce", "figure": "vaswani-table1"})
    made.save(tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {
        *("records.jsonl", "summary.csv", "tables.md", "report.html", "verdicts.md"),
        *(f"vaswani-table1.{kind}" for kind in ("png", "svg", "pdf")),
    }
    text = (tmp_path / "run/verdicts.md").read_text()
    assert all(
        finding.claim in text.replace("\\", "") for finding in findings(made.records, made.environment)
    )
    assert all(
        finding.verdict in " ".join(made.sentences()) for finding in findings(made.records, made.environment)
    )


def test_times_of_a_loaded_machine_carry_a_warning() -> None:
    environment = {"study": "reproduce", "figure": "vaswani-table1", "during": [{"others_share": 0.5}]}
    for during, warned in (([], False), (environment["during"], True)):
        told = " ".join(Results(table_1(), environment={**environment, "during": during}).sentences())
        assert ("could not tell on this machine now" in told) == warned


@pytest.mark.slow
@pytest.mark.parametrize("name", figures.list_figures())
def test_a_figure_is_measured_at_small_sizes(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    made = ea.reproduce(name, quick=True, threads=1, rounds=1, budget_s=60, out=folder)
    assert {record.status for record in made.records} <= {"ok", "skipped"}
    assert all(one.claim and one.measured and one.verdict for one in findings(made.records, made.environment))
    assert not made.interrupted and made.tables()
    files = ("records.jsonl", "environment.json", "command.txt", "summary.csv", "tables.md", "verdicts.md")
    assert {path.name for path in folder.iterdir()} >= {*files, f"{name}.png", f"{name}.svg", f"{name}.pdf"}
    again = ea.reproduce(name, quick=True, threads=1, rounds=1, budget_s=60, out=folder, resume=True)
    assert again.records == made.records
