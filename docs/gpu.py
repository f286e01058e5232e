"""Measures every path on a GPU, and writes the predicted and measured parts of docs/gpu.md.

    python docs/gpu.py --out results/<gpu>    measures on the GPU, two hours at most, and writes the page
    python docs/gpu.py                        writes the page again from the runs in results/

An interrupted measurement goes on with the same command.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parent))
import roofline
from choosing import table

import efficient_attn as ea
from efficient_attn.measure.units import show_seconds
from efficient_attn.report.table import to_markdown
from efficient_attn.report.text import three_digits
from efficient_attn.stats.estimates import Typical, call_time, on_device, time_ratio
from efficient_attn.studies.bench.tables import tables as bench_tables
from efficient_attn.studies.run_folder import RECORDS

HERE = Path(__file__).parent
PAGE, RESULTS = HERE / "gpu.md", HERE.parent / "results"

MASKS, PASSES, DTYPES = ("full", "causal"), ("", "-backward"), ("bfloat16", "float32")
BACKENDS = {
    "full": "exact,docs/flex_exact.py:flex,window,linformer,performer-positive,performer-trig,linear-elu",
    "causal": "exact,docs/flex_exact.py:flex,window,performer-positive,performer-trig,linear-elu",
}
SHAPE = ["--device", "cuda", "--num-heads", str(roofline.HEADS), "--head-dim", str(roofline.HEAD_DIM)]
# A point of exact attention at a million tokens takes minutes.
BENCH = ["--seq-len", "1024:1048576:x4", "--timeout", "5m", "--budget", "12m"]

# Names of finished runs, in the folder of a GPU.
FINISHED = "finished.txt"
# Exit codes after which other runs are worth a try: all points measured, some, none.
_CONTINUE = (0, 3, 4)


def commands() -> dict[str, list[str]]:
    """Arguments of efficient-attn by the name of the run's folder."""
    found = {}
    for mask, direction, dtype in product(MASKS, PASSES, DTYPES):
        flags = ["--causal"] * (mask == "causal") + ["--backward"] * bool(direction)
        run = ["bench", *SHAPE, "--dtype", dtype, *flags, "--backend", BACKENDS[mask], *BENCH]
        found[f"bench-{mask}{direction}-{dtype}"] = run
    return found


def measure(out: Path) -> None:
    """Run all commands that are not finished; ends at an interruption or a wrong request."""
    out.mkdir(parents=True, exist_ok=True)
    finished = out / FINISHED
    done = finished.read_text(encoding="utf-8").split() if finished.exists() else []
    program = Path(sys.executable).with_name("efficient-attn")
    for name, arguments in commands().items():
        if name in done:
            continue
        folder = ["--out", str(out / name), "--resume"]
        code = _ended([str(program), *arguments, *folder])
        if code not in _CONTINUE:
            raise SystemExit(f"{name} ended with code {code}; the same command goes on from here.")
        with finished.open("a", encoding="utf-8") as file:
            file.write(f"{name}\n")


def _ended(command: list[str]) -> int:
    """Exit code of a command that ends by itself when both are interrupted from the keyboard."""
    with subprocess.Popen(command, cwd=HERE.parent) as child:
        try:
            return child.wait()
        except KeyboardInterrupt:
            return child.wait()


class Goal(NamedTuple):
    """A time at 65 536 tokens, or a speed-up over exact attention there, in bfloat16 with 16 heads of 64."""

    name: str
    run: str
    backend: str
    wanted: float
    path: str
    speed: bool = False


_LINEAR = f"`{roofline.LINEAR}`"
GOAL_TOKENS = 65_536
GOALS = (
    Goal("full, forward", "bench-full", roofline.LINEAR, 0.6e-3, f"{_LINEAR}, two fused attentions"),
    Goal("its speed, exact = 1", "bench-full", roofline.LINEAR, 40, f"{_LINEAR}, two fused attentions", True),
    Goal("causal, forward", "bench-causal", roofline.LINEAR, 1.6e-3, f"{_LINEAR}, causal, operators"),
    Goal(
        "full, forward and backward",
        "bench-full-backward",
        roofline.LINEAR,
        2.5e-3,
        f"{_LINEAR}, two fused attentions, gradients by operators",
    ),
    Goal(
        "causal, forward and backward",
        "bench-causal-backward",
        roofline.LINEAR,
        5e-3,
        f"{_LINEAR}, causal, operators, with gradients",
    ),
    Goal(
        "full, forward",
        "bench-full",
        "window",
        0.4e-3,
        f"`window` of {roofline.WINDOW}, variable-length kernel",
    ),
)


def predicted() -> str:
    """Predicted times by path and length, and the goals beside them."""
    times = roofline.predictions()
    rows = [
        [path, model, *(three_digits(1e3 * time_s) for time_s in times[path].values())]
        for path, (model, _) in roofline.PATHS.items()
    ]
    exact = times["`exact`, FlashAttention-2"][GOAL_TOKENS]
    goals = []
    for goal in GOALS:
        time_s = times[goal.path][GOAL_TOKENS]
        goals.append([f"`{goal.backend}`", goal.name, _wanted(goal), _shown(goal, exact / time_s, time_s)])
    return "\n".join(
        [
            table(["path, times in ms", "model", *map(str, roofline.LENGTHS)], rows),
            table(["backend", f"at {GOAL_TOKENS} tokens", "wanted", "predicted"], goals),
        ]
    )


def _wanted(goal: Goal) -> str:
    return f"≥ {goal.wanted:g}" if goal.speed else f"≤ {show_seconds(goal.wanted)}"


def _shown(goal: Goal, speed: float, time_s: float) -> str:
    return three_digits(speed) if goal.speed else show_seconds(time_s)


def measured(results: Path = RESULTS) -> str:
    """All measurements of all GPUs in a folder of results, by device time."""
    gpus = {folder: runs for folder in sorted(results.glob("*")) if (runs := _runs(folder))}
    if not gpus:
        return (
            "No GPU has been measured. `python docs/gpu.py --out results/<gpu>` does it, in about two hours "
            "at most, and writes the tables in this place.\n"
        )
    return "\n".join(part for folder, runs in gpus.items() for part in _of_gpu(folder.name, runs))


def _runs(folder: Path) -> dict[str, ea.Results]:
    """Runs of a GPU that have records: one that was stopped at its beginning has none."""
    found = {name: folder / name for name in commands() if (folder / name / RECORDS).is_file()}
    return {name: run for name, path in found.items() if (run := ea.read(path)).records}


def _of_gpu(folder: str, runs: dict[str, ea.Results]) -> Iterator[str]:
    environment = next(iter(runs.values())).environment
    gpu, versions = environment.get("gpu") or {}, environment.get("packages") or {}
    kernels = sorted({record.kernels for run in runs.values() for record in run.records if record.kernels})
    yield (
        f"### {gpu.get('name', folder)}\n\n"
        f"Driver {gpu.get('driver_version')}, torch {versions.get('torch')}, "
        f"triton {versions.get('triton')}, kernels {', '.join(kernels)}; records in `results/{folder}`.\n"
    )
    rows = [[f"`{goal.backend}`", goal.name, _wanted(goal), _reached(goal, runs)] for goal in GOALS]
    yield table(["backend", f"at {GOAL_TOKENS} tokens", "wanted", "measured (95 % interval)"], rows)
    told: set[str] = set()
    for name, run in runs.items():
        made = bench_tables(run.records, run.environment)
        shown = [table for table in made if table.title.startswith(("Device", "Error"))]
        # A note stands under the first table that needs it.
        once = [one._replace(notes=tuple(note for note in one.notes if note not in told)) for one in shown]
        told |= {note for one in shown for note in one.notes}
        yield "\n\n".join([f"#### {name}", *map(to_markdown, once)]) + "\n"


def _reached(goal: Goal, runs: dict[str, ea.Results]) -> str:
    """The device time, or the speed by it, with its interval."""
    run = runs.get(f"{goal.run}-bfloat16")
    timed = {
        record.case.backend: on_device(record)
        for record in (run.records if run else ())
        if record.case.tokens == GOAL_TOKENS and record.device_times_s
    }
    if goal.backend not in timed or (goal.speed and "exact" not in timed):
        return "–"
    if goal.speed:
        return _interval(time_ratio(timed[goal.backend], timed["exact"]), three_digits)
    return _interval(call_time(timed[goal.backend]), show_seconds)


def _interval(found: Typical, show: Callable[[float], str]) -> str:
    edges = "" if found.low is None or found.high is None else f" ({show(found.low)} to {show(found.high)})"
    return f"{show(found.median)}{edges}"


def page(text: str, results: Path = RESULTS) -> str:
    """The text of the page with its generated parts written again."""
    for name, part in (("predicted", predicted()), ("measured", measured(results))):
        begin, end = (f"<!-- {name} by docs/gpu.py: {edge} -->" for edge in ("begin", "end"))
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise SystemExit(f"The page has no part between {begin} and {end}.")
        text = f"{before}{begin}\n\n{part}\n{end}{after}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="Folder of this GPU's runs, results/<gpu>.")
    out = parser.parse_args().out
    # Commands run in the folder of the project, whatever the current one is.
    out = out and out.resolve()
    if out is not None:
        measure(out)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), out.parent if out else RESULTS), encoding="utf-8")


if __name__ == "__main__":
    main()
