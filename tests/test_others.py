"""The page about other packages says what was found about them; no test here needs one of them."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from efficient_attn.testing import check_names

ROOT = Path(__file__).parent.parent
DOCS, FOLDER = ROOT / "docs", ROOT / "results" / "other-packages"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """The script that finds and writes, which looks for the packages beside itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        yield importlib.import_module("others_page")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return json.loads((FOLDER / "findings.json").read_text(encoding="utf-8"))


def test_the_page_is_what_was_found(script: ModuleType, found: dict[str, Any]) -> None:
    written = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert written == script.page(found), "run: python docs/others_page.py page"


def test_the_page_for_users_of_the_packages_has_the_counts(script: ModuleType, found: dict[str, Any]) -> None:
    page = (DOCS / "coming-from.md").read_text(encoding="utf-8")
    for outcome in (script.KEPT, script.BROKEN, script.NOT_OFFERED):
        row = " | ".join(script._counts(outcome, found["packages"]))
        assert f"| {row} |" in page


def test_every_package_is_pinned_and_checked_by_the_same_promises(
    script: ModuleType, found: dict[str, Any]
) -> None:
    assert list(found["packages"]) == list(script.others.PINNED) == list(script.others.PACKAGES)
    asked = [[row["check"] for row in rows] for rows in found["packages"].values()]
    assert all(checks == asked[0] for checks in asked)
    left_out = script.OURS | script.NOT_ASKED
    assert {*asked[0], *left_out} <= set(check_names()), "run: python docs/others_page.py"
    assert not left_out & set(asked[0])


def test_a_broken_promise_comes_with_the_input_that_shows_it(
    script: ModuleType, found: dict[str, Any]
) -> None:
    rows = [row for rows in found["packages"].values() for row in rows]
    assert {row["outcome"] for row in rows} <= {script.KEPT, script.BROKEN, script.NOT_OFFERED}
    assert all("q [" in row["detail"] for row in rows if row["outcome"] == script.BROKEN)
    assert all(row["detail"] for row in rows if row["outcome"] == script.NOT_OFFERED)


def test_what_is_found_is_counted_tabled_and_listed(script: ModuleType) -> None:
    kept = {"check": "a", "promise": "It holds.", "outcome": "kept", "detail": ""}
    broken = {**kept, "outcome": "broken", "detail": "Row sums: q [1].", "error": None, "bound": 1e-12}
    packages = {"performer-pytorch": [kept], "local-attention": [broken], "linformer": [kept]}
    page = script.page({"date": "2001-02-03", "python": "3", "torch": "2", "packages": packages})
    assert "Found on 2001-02-03 with Python 3 and torch 2" in page
    assert "| broken | 0 | 1 | 0 |" in page and "| It holds. | kept | broken | kept |" in page
    section = page.split("## local-attention 1.11.2")[1].split("## linformer")[0]
    assert "- It holds. *Row sums: q [1].* Error NaN, at most 1e-12." in section
    assert "class LocalAttention(nn.Module)" in section


def test_an_error_is_not_offered_and_a_wrong_answer_is_broken(script: ModuleType) -> None:
    assert not script._is_wrong("It raised RuntimeError: no. On q [1].")
    assert script._is_wrong("It raised GradcheckError: Jacobian mismatch. On q [1].")
    assert script._is_wrong("Row sums: q [1].")


def test_how_much_an_error_is_above_its_bound_is_told_where_it_is_narrow(script: ModuleType) -> None:
    row = {"detail": "Mean: q [1]."}
    assert script._shown(row | {"error": 1.19, "bound": 1.0}).endswith("Error 1.2, at most 1: 19 % above.")
    assert script._shown(row | {"error": 2.1, "bound": 1.0}).endswith("Error 2.1, at most 1.")
    assert script._shown(row | {"error": 1.0, "bound": 0.0}).endswith("Error 1, at most 0.")
