"""Checks attention of other packages with our suite, and writes results/other-packages.

`python docs/others_page.py` needs the packages; others.py says how to install them.
`python docs/others_page.py page` writes the page again from what was found, and needs none of them.
"""

import datetime
import inspect
import json
import platform
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import others
import torch

from efficient_attn.testing import check, check_names

FOLDER = Path(__file__).parent.parent / "results" / "other-packages"
KEPT, BROKEN, NOT_OFFERED = "kept", "broken", "not offered"

# An error of fewer times its bound is told with how much it is above.
_NARROW = 2

# Promises of exact attention, which none of them is, and of our window, which is measured otherwise.
NOT_ASKED = {
    "equals_softmax_attention",
    "a_window_reads_its_neighbourhood",
}

# Tests of the interface that this toolkit adds to every backend.
OURS = {
    "empty_inputs_give_empty_outputs",
    "what_is_not_promised_is_refused",
    "calibration_is_an_explicit_act",
}


def findings(name: str) -> list[dict[str, Any]]:
    """Outcome of each test on a package.

    A test is "not offered" where the package has no argument for it, or refuses the input by an error.
    """
    package = others.PACKAGES[name]
    if version(name) != others.PINNED[name]:
        raise SystemExit(f"{name} is {version(name)}; this page is of {others.PINNED[name]}.")
    checks = [check for check in check_names() if check not in OURS | NOT_ASKED]
    rows = []
    for record in check(others.spec_of(name, package), on_fail="collect", only=checks):
        outcome, detail = NOT_OFFERED, record.detail
        if record.check in package.lacks:
            detail = package.lacks[record.check]
        elif record.outcome.startswith(KEPT):
            outcome = KEPT
        elif record.outcome == BROKEN and _is_wrong(detail):
            outcome = BROKEN
        figures = {"error": record.as_dict()["error"], "bound": record.as_dict()["bound"]}
        rows.append(
            {"check": record.check, "promise": record.promise, "outcome": outcome, "detail": detail}
            | (figures if outcome == BROKEN else {})
        )
    return rows


def _is_wrong(detail: str) -> bool:
    """Whether a result was wrong, not refused. The check of gradients reports it by its own error."""
    return not detail.startswith("It raised") or "GradcheckError" in detail


def page(results: dict[str, Any]) -> str:
    """The page of the results."""
    packages = results["packages"]
    names = [f"{name} {others.PINNED[name]}" for name in packages]
    parts = [INTRODUCTION.format(date=results["date"], python=results["python"], torch=results["torch"])]
    parts += [_table(["", *names], [_counts(outcome, packages) for outcome in (KEPT, BROKEN, NOT_OFFERED)])]
    rows = zip(*packages.values(), strict=True)
    outcomes = [[row[0]["promise"], *(record["outcome"] for record in row)] for row in rows]
    parts += ["## All tests", _table(["test", *names], outcomes)]
    for name, title in zip(packages, names, strict=True):
        parts += [f"## {title}", "The adapter:", _code(others.PACKAGES[name].adapter)]
        parts += [
            "### Broken",
            _list(packages[name], BROKEN),
            "### Not offered",
            _list(packages[name], NOT_OFFERED),
        ]
    return "\n\n".join(parts) + "\n"


INTRODUCTION = """# Other packages, checked

<!-- Written by `python docs/others_page.py`; do not edit. -->

These are results of the conformance suite (`efficient-attn check`,
[tests](../../docs/new-attention.md#conformance-tests)) on attention in three other packages, each at one
version, through the adapters shown below. The requirements are this project's, and none of the packages
claims to meet them: a broken test marks a difference to expect when you compare results or move code, with
the smallest failing input of the suite. "Not offered" covers missing arguments, refused inputs, and tests
without a suitable input. Tests of exact attention, which none of the three computes, are omitted, and so are
tests of the interface that this project adds to every backend: empty inputs, messages, autocast.

Errors below twice their bound are listed with their excess, since they could pass with other seeds. Isotropy
allows 4.5 standard errors of 150 draws; the limit of many features allows ten times the error with 64
features, scaled by 1/√size.

The suite ran on {date} with Python {python} and torch {torch}, on the CPU, by `python docs/others_page.py`;
`docs/others.py` lists the packages to install. Some tests were merged afterwards: a merged test has the worst
outcome of its parts."""


def _counts(outcome: str, packages: dict[str, Any]) -> list[str]:
    return [
        outcome,
        *(str(Counter(record["outcome"] for record in rows)[outcome]) for rows in packages.values()),
    ]


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _code(adapter: type) -> str:
    return f"```py\n{inspect.getsource(adapter)}```"


def _list(rows: list[dict[str, Any]], outcome: str) -> str:
    chosen = [row for row in rows if row["outcome"] == outcome]
    return "\n".join(f"- {row['promise']} {_shown(row)}".rstrip() for row in chosen) or "Nothing."


def _shown(row: dict[str, Any]) -> str:
    figures = ""
    if "error" in row and row["bound"] is not None:
        error, bound = row["error"], row["bound"]
        shown = "NaN" if error is None else f"{error:.2g}"
        figures = f" Error {shown}, at most {bound:.2g}"
        if error is not None and error < _NARROW * bound:
            figures += f": {100 * (error / bound - 1):.2g} % above"
        figures += "."
    detail = row["detail"].removeprefix("It raised GradcheckError: ").replace("*", "·")
    return f"*{detail}*{figures}" if detail else ""


def main() -> None:
    file = FOLDER / "findings.json"
    if sys.argv[1:] != ["page"]:
        results = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "python": platform.python_version(),
            "torch": torch.__version__.partition("+")[0],
            "packages": {name: findings(name) for name in others.PINNED},
        }
        file.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    results = json.loads(file.read_text(encoding="utf-8"))
    (FOLDER / "README.md").write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
