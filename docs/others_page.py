"""Checks attention of other packages with our suite, and writes results/other-packages.

`python docs/others_page.py [NAME…]` downloads each package, or these, into a folder of its own, which is
deleted at the end, and runs there the checks, the comparison of times and the script of a finding.
`python docs/others_page.py page` writes the page again from what was found, and downloads nothing.
"""

import datetime
import inspect
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from others_packages import PACKAGES

import efficient_attn as ea
from efficient_attn.conformance.records import UNPROMISED
from efficient_attn.conformance.table import CHECKS
from efficient_attn.registry import SPECS
from efficient_attn.testing import check, check_names

FOLDER = Path(__file__).parent.parent / "results" / "other-packages"
FINDINGS = FOLDER / "findings.json"
KEPT, BROKEN, NOT_OFFERED = "kept", "broken", "not offered"

# Multiple of the bound below which the page says how far an error is above it, and percent of a narrow one.
_NEAR, _NARROW = 2, 20

# Batch, heads, tokens and head size of the comparison of times, and its rounds.
SHAPE, ROUNDS = (1, 8, 1024, 64), 7

# Tests of our window, which is measured otherwise, of exchanges between ranks, and of compilation, states and
# equal bits in any batch, which none of the adapters offers.
NOT_ASKED = {
    "a_window_reads_its_neighbourhood",
    "any_number_of_sequences_go_on_from_a_state",
    "bits_do_not_depend_on_the_batch",
    "compiled_it_is_the_same",
    "gradients_pass_through_states",
    "long_states_are_whole",
    "parts_of_any_size_are_the_whole",
    "parts_on_several_ranks_are_the_whole",
    "very_long_states_are_whole",
}

# Tests of the interface that this toolkit adds to every backend.
OURS = {
    "empty_inputs_give_empty_outputs",
    "what_is_not_promised_is_refused",
    "calibration_is_an_explicit_act",
}


def findings(name: str) -> list[dict[str, Any]]:
    """Outcome of each test on a package.

    A test is "not offered" where the package has no argument for it, or refuses the input by an error. What
    it lacks is not run.
    """
    package = PACKAGES[name]
    rows = []
    for test in check_names():
        if test in OURS | NOT_ASKED:
            continue
        row = {"check": test, "promise": CHECKS[test].promise, "outcome": NOT_OFFERED}
        rows.append(row)
        if test in package.lacks:
            row["detail"] = package.lacks[test]
            continue
        (record,) = check(package.spec, on_fail="collect", only=[test])
        if record.outcome in (KEPT, UNPROMISED):
            row["outcome"] = KEPT
            continue
        # The Jacobians of a mismatch are longer than the input.
        row["detail"] = re.sub(r",? numerical:.* On ", ". On ", record.detail)
        if record.outcome == BROKEN and _is_wrong(record.detail):
            row["outcome"] = BROKEN
            row |= {"error": _figure(record.error), "bound": _figure(record.bound)}
    return rows


def _figure(value: float | None) -> float | str | None:
    """A number of strict JSON, or the text of NaN or infinity."""
    return value if value is None or math.isfinite(value) else str(value)


def _is_wrong(detail: str) -> bool:
    """Whether a result was wrong, not refused. The check of gradients reports it by its own error."""
    return not detail.startswith("It raised") or "GradcheckError" in detail


@torch.no_grad()
def times(name: str) -> list[float]:
    """Quartiles of the package's processor time over ours, in turns on one thread."""
    torch.set_num_threads(1)
    package, (batch, heads, tokens, dim) = PACKAGES[name], SHAPE
    sizes = {"head_dim": dim, "num_heads": heads, "max_tokens": tokens, "causal": package.causal}
    ours, size = package.beside
    specs = (package.spec, package.size), (SPECS[ours], size)
    calls = []
    for spec, number in specs:
        chosen = {spec.size_option: number} if number else {}
        calls.append(ea.build(spec, **sizes, **chosen).eval())
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(batch, heads, tokens, dim, generator=generator) for _ in range(3)]
    ratios = []
    for _ in range(ROUNDS + 1):
        seconds = []
        for call in calls:
            begin = time.process_time()
            call(*inputs)
            seconds.append(time.process_time() - begin)
        ratios.append(seconds[0] / seconds[1])
    # The first round warms up.
    return statistics.quantiles(ratios[1:], n=4)


def script(name: str) -> Path:
    """The file that shows a finding with the package alone; not every package has one."""
    return FOLDER / f"finding-{name}.py"


def in_environments(names: list[str]) -> dict[str, Any]:
    """Results of packages, each in a folder with its pinned requirements."""
    results = {}
    with tempfile.TemporaryDirectory() as place:
        for number, name in enumerate(names):
            folder = f"{place}/{number}"
            pins = PACKAGES[name].pins.split()
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
            subprocess.run([*install, *pins], check=True)
            path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
            environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
            output = Path(place) / f"{number}.json"
            subprocess.run([sys.executable, __file__, "check", name, output], check=True, env=environment)
            results[name] = json.loads(output.read_text(encoding="utf-8"))
            if script(name).exists():
                command = [sys.executable, "-W", "ignore", str(script(name))]
                process = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
                results[name]["output"] = process.stdout
            print(f"{name}: {Counter(row['outcome'] for row in results[name]['rows'])}", flush=True)
    return results


def result(name: str) -> dict[str, Any]:
    """Rows and times of a package that is installed here."""
    package, _, pin = PACKAGES[name].pins.split()[0].partition("==")
    if version(package) != pin:
        raise SystemExit(f"{package} is {version(package)}; this page is of {pin}.")
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__.partition("+")[0],
        "times": times(name),
        "rows": findings(name),
    }


INTRODUCTION = """# Other packages, checked

<!-- Written by `python docs/others_page.py`; do not edit. -->

These are results of the conformance suite (`efficient-attn check`,
[tests](../../docs/new-attention.md#conformance-tests)) on {number} attentions of other packages, each at one
version, through the adapters shown below. The requirements are this project's, and none of the packages
claims to meet them: a broken test marks a difference to expect when you compare results or move code, with
the smallest failing input of the suite. One cause may break many tests. Of the {broken} broken tests of
x-transformers, {nan} have an error of NaN, {masked} of these with masked keys, mostly from
[rows without a visible key](#x-transformers-by-hand). x-transformers, Longformer and neuralops compute
float64 partly in float32, which most tests notice. "Not offered" means by the package or its adapter: an
argument is missing, an input is refused, or no input suits the test. Tests of the interface that this project
adds to every backend are omitted: empty inputs, messages, autocast, and so are compilation, equal bits in any
batch and states of decoding. Keys of another length than queries are tested of x-transformers and linformer
only.

Times are processor times of one call, forward, over those of our backend of the same method in the same
process, medians and quartiles of {rounds} turns on one thread. Above 1 ours is faster. The shape is
{shape}, float32.
`flash-linear-attention` is its reference in plain torch: its kernels need a GPU. linear-attention-transformer
and `linear-elu` take other features. BigBird reads no random blocks in evaluation.

The suite ran with Python {python} and torch {torch}, on the CPU, by `python docs/others_page.py`."""


def page(results: dict[str, Any]) -> str:
    """The page of the results."""
    runs = list(results.values())
    shape = "batch {}, {} heads, {} tokens, heads of {}".format(*SHAPE)
    settings = {key: _joined(run[key] for run in runs) for key in ("python", "torch")}
    _, settings["broken"], settings["nan"], _ = counts(results["x-transformers"])
    rows = results["x-transformers"]["rows"]
    settings["masked"] = str(sum(_is_nan(row) and "mask" in row["detail"] for row in rows))
    parts = [INTRODUCTION.format(number=len(runs), shape=shape, rounds=ROUNDS, **settings)]
    header = ["attention", "package", "checked", KEPT, BROKEN, "of these NaN", NOT_OFFERED]
    header += ["our backend", "its time ÷ ours"]
    parts.append(_table(header, [_summary(name, run) for name, run in results.items()]))
    parts.append("## Confirmed by hand\n\nThese scripts need the package alone.")
    for name, run in results.items():
        if "output" in run:
            parts += [f"### {name} by hand", f"```py\n{script(name).read_text(encoding='utf-8')}```"]
            parts.append(f"```text\n{run['output']}```")
    parts += ["## All tests", _table(["test", BROKEN, NOT_OFFERED], _tests(results))]
    for name, run in results.items():
        parts += [f"## {name}", "The adapter:", _code(PACKAGES[name].adapter), "### Broken"]
        parts += [_list(run["rows"]), "### Not offered", _reasons(run["rows"])]
    return "\n\n".join(parts) + "\n"


def _joined(values: Any) -> str:
    return ", ".join(sorted(set(values)))


def counts(run: dict[str, Any]) -> list[str]:
    """Numbers of tests kept, broken, broken by NaN and not offered."""
    outcomes = Counter(row["outcome"] for row in run["rows"])
    numbers = outcomes[KEPT], outcomes[BROKEN], sum(map(_is_nan, run["rows"])), outcomes[NOT_OFFERED]
    return [str(number) for number in numbers]


def ratio(run: dict[str, Any]) -> str:
    """Median and quartiles of the times."""
    low, middle, high = (f"{value:.2g}" for value in run["times"])
    return f"{middle} ({low} to {high})"


def _summary(name: str, run: dict[str, Any]) -> list[str]:
    package = PACKAGES[name]
    pin = package.pins.split()[0].replace("==", " ")
    return [f"[{name}](#{name})", pin, run["date"], *counts(run), f"`{package.beside[0]}`", ratio(run)]


def _tests(results: dict[str, Any]) -> list[list[str]]:
    """A row per test, with the packages that break it and that do not offer it."""
    promises: dict[str, str] = {}
    for run in sorted(results.values(), key=lambda run: run["date"], reverse=True):
        for row in run["rows"]:
            promises.setdefault(row["check"], row["promise"])
    lines = []
    for test, promise in promises.items():
        names: dict[str, list[str]] = {KEPT: [], BROKEN: [], NOT_OFFERED: []}
        for name, run in results.items():
            for row in run["rows"]:
                if row["check"] == test:
                    above = _above(row)
                    names[row["outcome"]].append(f"{name} ({above})" if above else name)
        lines.append([promise, ", ".join(names[BROKEN]), ", ".join(names[NOT_OFFERED])])
    return lines


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _code(adapter: type) -> str:
    return f"```py\n{inspect.getsource(adapter)}```"


def _list(rows: list[dict[str, Any]]) -> str:
    lines = [f"- {row['promise']} {_shown(row)}".rstrip() for row in rows if row["outcome"] == BROKEN]
    return "\n".join(lines) or "Nothing."


def _reasons(rows: list[dict[str, Any]]) -> str:
    """Reasons, each with its tests."""
    reasons = defaultdict(list)
    for row in rows:
        if row["outcome"] == NOT_OFFERED:
            reasons[_text(row["detail"]) or "Not offered."].append(row["promise"])
    lines = [f"- *{reason}* {' '.join(promises)}" for reason, promises in reasons.items()]
    return "\n".join(lines) or "Nothing."


def _shown(row: dict[str, Any]) -> str:
    figures = ""
    if _is_nan(row):
        figures = " Error NaN."
    elif row["bound"] is not None:
        above = _above(row)
        figures = f" Error {float(row['error']):.2g}, at most {row['bound']:.2g}{above and f': {above}'}."
    return f"*{_text(row['detail'])}*{figures}"


def _is_nan(row: dict[str, Any]) -> bool:
    """Whether the error or its bound is NaN."""
    return "nan" in (row.get("error"), row.get("bound"))


def _above(row: dict[str, Any]) -> str:
    """How much an error exceeds a bound that is near."""
    if _is_nan(row) or not row.get("bound"):
        return ""
    percent = 100 * (float(row["error"]) / row["bound"] - 1)
    if percent >= 100 * (_NEAR - 1):
        return ""
    return f"{'narrowly broken, ' if percent < _NARROW else ''}{percent:.2g} % above"


def _text(detail: str) -> str:
    return detail.removeprefix("It raised GradcheckError: ").replace("*", "·").replace("_", "\\_")


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] == ["check"]:
        Path(arguments[2]).write_text(json.dumps(result(arguments[1])), encoding="utf-8")
        return
    stored = json.loads(FINDINGS.read_text(encoding="utf-8")) if FINDINGS.exists() else {}
    if arguments != ["page"]:
        stored |= in_environments(arguments or list(PACKAGES))
        stored = {name: stored[name] for name in PACKAGES if name in stored}
        FINDINGS.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (FOLDER / "README.md").write_text(page(stored), encoding="utf-8")


if __name__ == "__main__":
    main()
