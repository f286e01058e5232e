"""The examples on claims of papers: they run, and their page shows what they measured."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs/examples/papers"
SHARED = "claims"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != SHARED)
PAGE = (ROOT / "results/papers/README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def shared():
    return runpy.run_path(str(FOLDER / f"{SHARED}.py"))


def stored(name: str) -> dict:
    return json.loads((ROOT / f"results/papers/{name}.json").read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_example_prints_its_claims_and_writes_numbers_and_a_plot(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(FOLDER / f"{name}.py"), "--quick", "--out", str(tmp_path)]
    # A script finds its neighbour in its own folder, which a variable of continuous integration leaves out.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=variables)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    statements = [claim["statement"] for claim in stored(name)["claims"]]
    assert [claim["statement"] for claim in content["claims"]] == statements
    assert all(claim["verdict"] in done.stdout for claim in content["claims"])
    assert content["settings"]["quick"] and (tmp_path / f"{name}.png").stat().st_size > 0


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_a_row_with_the_verdict_of_every_claim(name: str) -> None:
    assert not stored(name)["settings"]["quick"] and (ROOT / f"results/papers/{name}.png").exists()
    rows = [
        line.strip("| ").split(" | ") for line in PAGE.splitlines() if f"/examples/papers/{name}.py)" in line
    ]
    verdicts = [claim["verdict"] for claim in stored(name)["claims"]]
    # A page leaves out the places, not that there are undecided ones.
    assert [cells[2].split(",")[0] for cells in rows] == [
        re.split("[;:]| at | up to ", one)[0] for one in verdicts
    ]
    assert [", partly undecided" in cells[2] for cells in rows] == [";" in one for one in verdicts]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"a": True, "b": True}, "holds"),
        ({"a": True, "b": None}, "holds; undecided at b"),
        ({"a": True, "b": False, "c": None}, "turns round at b"),
        ({"a": False, "b": False}, "does not hold"),
        ({"a": None}, "undecided"),
        ({}, "undecided"),
    ],
)
def test_a_verdict_follows_from_the_answers(shared, answers, expected) -> None:
    assert shared["verdict"](answers) == expected


@pytest.mark.parametrize("count", [6, 15, 40])
def test_the_interval_is_the_narrowest_of_order_statistics_with_95_percent(shared, count) -> None:
    scipy = pytest.importorskip("scipy.stats")
    low = int(shared["median_interval"](range(count)).low)
    assert scipy.binom.cdf(low, count, 0.5) <= 0.025 < scipy.binom.cdf(low + 1, count, 0.5)
