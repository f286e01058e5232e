"""Writes the part of docs/gpu.md that says what `gpu-check` measured on each GPU of results/gpu/."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
from choosing import table

from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.variants import YARDSTICK
from efficient_attn.report.text import three_digits
from efficient_attn.stats.estimates import DEVICE_TIME, TIME, by_clock, call_time, curves
from efficient_attn.stats.predicted_time import crossover
from efficient_attn.stats.speeds import SpeedUp, speed_ups
from efficient_attn.tools.gpu_check import GpuCheck, show_gpu_check

HERE = Path(__file__).parent
PAGE, RESULTS = HERE / "gpu.md", HERE.parent / "results/gpu"

LINEAR, OPERATORS = "performer-positive", "performer-positive, operators"
# Milliseconds of the model of docs/roofline.py for an H100 at these lengths, by label, causal and
# backward. A factor of two either way is a finding.
PREDICTED_LENGTHS = (4096, 16384, 65536, 262144)
PREDICTED_MS = {
    (YARDSTICK, False, False): (0.143, 2.22, 35.4, 566),
    (YARDSTICK, True, False): (0.111, 1.70, 27.2, 434),
    ("window", False, False): (0.0249, 0.0845, 0.323, 1.28),
    (LINEAR, False, False): (0.143, 0.272, 0.787, 2.85),
    (LINEAR, False, True): (1.19, 4.22, 16.4, 65.2),
    (LINEAR, True, False): (0.11, 0.35, 1.35, 5.2),
    (LINEAR, True, True): (0.36, 1.4, 5.5, 22),
    (OPERATORS, False, False): (0.741, 2.83, 11.5, 46.3),
    (OPERATORS, False, True): (1.78, 6.78, 27.2, 109),
    (OPERATORS, True, False): (2.23, 7.34, 29.2, 117),
    (OPERATORS, True, True): (7.12, 24.3, 96.7, 387),
}


def measured(results: Path = RESULTS) -> str:
    """Outcomes and times of every folder of a check."""
    folders = sorted(path.parent for path in results.glob("*/verdict.json"))
    return "\n".join(part for folder in folders for part in _of_gpu(folder, show_gpu_check(folder)))


def _of_gpu(folder: Path, check: GpuCheck) -> Iterator[str]:
    machine, kernels = check.verdict["machine"], check.verdict["kernels"]
    passed = [
        f"`{name}` in {', '.join(precisions)}"
        for name, kernel in kernels.items()
        if (precisions := [x for x, entry in kernel["precisions"].items() if entry["outcome"] == "passed"])
    ]
    yield (
        f"### {machine['gpu']}\n\ntorch {machine['torch']}, triton {machine['triton']}, ptxas "
        f"{machine['ptxas']}; {'records' if check.records else 'verdict'} in `results/gpu/{folder.name}`. "
        f"Passed: {'; '.join(passed)}.\n"
    )
    clocks = by_clock(check.records)
    timed = clocks.get(DEVICE_TIME, ())
    times = {(*_call(r.case), r.case.tokens): 1000 * call_time(r).median for r in timed}
    queued, single = (_starts(records) for records in (timed, clocks[TIME]))
    rows = []
    for call in dict.fromkeys(key[:4] for key in sorted(times, key=lambda key: key[1:4])):
        label, dtype, causal, backward = call
        marks = {"float32": dtype == "float32", "causal": causal, "with gradients": backward}
        name = ", ".join([label, *(mark for mark, holds in marks.items() if holds)])
        predicted = PREDICTED_MS.get((label, causal, backward)) if dtype == "bfloat16" else None
        cells = []
        for n, guess in zip(PREDICTED_LENGTHS, predicted or [None] * 4, strict=True):
            time = times.get((*call, n))
            shown = "–" if time is None else three_digits(time)
            cells.append(shown if guess is None or time is None else f"{shown} ({three_digits(guess)})")
        starts = filter(None, (queued.get(call), single.get(call)))
        rows.append([name, *cells, "; ".join(starts)])
    if rows:
        lengths = map(str, PREDICTED_LENGTHS)
        yield table(["call, ms (predicted)", *lengths, "faster from, tokens: queued; single"], rows)


def _starts(records: Sequence[Record]) -> dict[Any, str]:
    """Length from which each call is faster than exact attention, by call."""
    return {_call(row.case): _start(row) for row in speed_ups(curves(records, "time_s"))}


def _call(case: Case) -> tuple[str, str, bool, bool]:
    return case.label, case.dtype, case.causal, case.backward


def _start(row: SpeedUp) -> str:
    """Length from which a call is faster than exact attention, with its interval, or "" if undecided."""
    tokens, low, high = (end and int(float(f"{end:.2g}")) for end in crossover(row.ratios))
    if tokens is None:
        return ""
    return f"{tokens}" if low == high else f"{tokens} ({low or ''}–{high or ''})"


def page(text: str, results: Path = RESULTS) -> str:
    """The text of the page with its generated part written again."""
    begin, end = (f"<!-- measured by docs/gpu.py: {edge} -->" for edge in ("begin", "end"))
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{measured(results)}\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
