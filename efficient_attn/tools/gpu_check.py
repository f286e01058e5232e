"""Check, time and share the fused kernels on the GPU of this machine."""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from efficient_attn.conformance.kernel_check import SUBJECTS, check_kernel
from efficient_attn.errors import DataError, UnsupportedError
from efficient_attn.measure.clock import COLD
from efficient_attn.measure.environment import available_bytes, environment, usable_cores
from efficient_attn.measure.isolation import CrashError, Measurer, Process
from efficient_attn.measure.record import Reading, Record, write
from efficient_attn.measure.record import read as read_records
from efficient_attn.measure.units import show_seconds
from efficient_attn.measure.variants import YARDSTICK, select
from efficient_attn.ops import paths, verdict
from efficient_attn.ops.exact_kernels import KERNELS
from efficient_attn.report.table import Table, markdown_line, to_markdown
from efficient_attn.runs.engine import Engine
from efficient_attn.runs.store import RECORDS, Store, open_folder, read_json, run_folder
from efficient_attn.runs.study import Points, Run, Settled
from efficient_attn.runs.workload import Costs, Workload, settle
from efficient_attn.stats.estimates import on_device, time_ratio
from efficient_attn.studies.bench import Bench
from efficient_attn.studies.bench.tables import START

VERDICT, PAGE = "verdict.json", "gpu-check.md"
LENGTHS = (1024, 4096, 16384, 65536, 262144)
CHECK_LIMIT_S, MEASURE_BUDGET_S = 170.0, 600.0
# Memory of one check, mostly weights in float64, and checks beside one another.
_CHECK_BYTES, _MOST_CHECKS = 8 << 30, 6
_HEADS, _HEAD_DIM, _ROUNDS = 16, 64, 4
_LINEAR, _OPERATORS = "performer-positive", "performer-positive, operators"
# Causality of the measured calls that each kernel serves; in float32 one does, whose longest calls are slow.
_TIMED = {"flex": False, "causal-linear": True}
_LONGEST_SLOW = 16384

# A time or speed-up with its interval, in place of which a report has UNCLEAR.
_SPREAD, UNCLEAR = re.compile(r"~?([\d.]+)×?\??\t(?:([\d.]+) to ([\d.]+)|interval beyond .+)"), "unclear"

Say = Callable[[str], None]


class GpuCheck(NamedTuple):
    """Outcome of `gpu_check`.

    Attributes:
        verdict: Machine, environment, outcome of each kernel by precision, and notes.
    """

    verdict: Mapping[str, Any]
    records: Sequence[Record]

    @property
    def outcomes(self) -> set[str]:
        return {entry["outcome"] for _, _, entry in _entries(self.verdict["kernels"])}

    def tables(self) -> list[Table]:
        rows, notes = [], [*self.verdict["notes"]]
        for kernel, precision, entry in _entries(self.verdict["kernels"]):
            shares = [f"{verb} {share:.2f}" for verb, share in entry.get("worst", {}).items()]
            served = f"{entry['served']} of {entry['cases']}" if "cases" in entry else ""
            rows.append((kernel, precision, entry["outcome"], entry["tile"], served, ", ".join(shares)))
            notes += [f"{kernel}, {precision}: {text}" for text in entry.get("reasons", ())]
        columns = ("kernel", "precision", "outcome", "tile", "cases served", "largest error / bound")
        title = f"Fused kernels on {self.verdict['machine']['gpu']}"
        times = Bench().view("tables", self.records, Run(Settled())) if self.records else []
        return [Table(title, columns, tuple(rows), (*notes,)), *map(_without_wide, times)]

    def sentences(self) -> list[str]:
        """Speeds against exact attention, with crossovers."""
        return Bench().view("sentences", self.records, Run(Settled())) if self.records else []

    def page(self) -> str:
        """One page of Markdown."""
        facts = [f"- {name}: {value}" for name, value in self.verdict["machine"].items()]
        texts = ["# Fused kernels of efficient-attn on a GPU", "\n".join(map(markdown_line, facts))]
        texts += [*map(to_markdown, self.tables()), *map(markdown_line, self.sentences())]
        return "\n\n".join(texts) + "\n"


def _entries(kernels: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for kernel, stored in kernels.items():
        for precision, entry in stored["precisions"].items():
            yield kernel, precision, entry


def _without_wide(table: Table) -> Table:
    """Replace times and speed-ups by UNCLEAR if their interval exceeds ×2."""
    rows = [[*row] for row in table.rows]
    for row, (column, heading) in product(rows, enumerate(table.columns)):
        spread = _SPREAD.fullmatch(row[column])
        if spread is None or heading == START:
            continue
        # Of an interval beyond ×3 a cell has no numbers.
        value, low, high = (float(number or "nan") for number in spread.groups())
        if not (value <= 2 * low and high <= 2 * value):
            row[column] = UNCLEAR
    best = [(row, column) for row, column in table.best if rows[row][column] != UNCLEAR]
    unclear = any(UNCLEAR in row for row in rows)
    notes = (*table.notes, *[f"{UNCLEAR}: the 95 % interval reaches beyond ×2."] * unclear)
    return table._replace(rows=tuple(map(tuple, rows)), best=tuple(best), notes=notes)


def show_gpu_check(folder: str | Path) -> GpuCheck:
    """Read the folder of a check, of this machine or another."""
    folder = Path(folder)
    content = read_json(folder / VERDICT)
    try:
        reading = read_records(folder / RECORDS) if (folder / RECORDS).exists() else Reading((), False, {})
        notes = [*content["notes"], *reading.notes(RECORDS)]
        records = tuple(Store(rows=reading.records).records.values())
        outcome = GpuCheck({**content, "notes": notes}, records)
        outcome.page()
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{folder / VERDICT} is no verdict of gpu-check: {error}.") from None
    return outcome


def gpu_check(
    *,
    out: str | Path | None = None,
    device: str = "auto",
    measure: bool = True,
    budget_s: float = MEASURE_BUDGET_S,
    say: Say = lambda text: None,
) -> GpuCheck:
    """Check every fused kernel on the GPU, time calls, and write a folder to share.

    The check takes at most three minutes, the measurement at most `budget_s`. The verdict is kept in the
    user's cache folder: from then on kernels serve that passed and were not slower than PyTorch's operators.

    Args:
        out: New folder of the records, the page and the verdict; None: `runs/gpu-check-TIME`.
        say: Receives lines of progress.

    Raises:
        UnsupportedError: If there is no GPU for which Triton compiles.
    """
    workload = settle(Workload(device=device, num_heads=_HEADS, head_dim=_HEAD_DIM))
    place = torch.device(workload.device)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    if not paths.compiles(place):
        raise UnsupportedError(
            "gpu-check needs an NVIDIA GPU of Ampere or later, Triton and a C compiler; not all are here. "
            "--show FOLDER shows a check of another machine."
        )
    folder = open_folder(out or run_folder("gpu-check"), name="out", fresh=True)
    machine, variables, notes = assembler(verdict.machine(place))
    refused = verdict.refusal(machine["capability"], machine["ptxas"])
    kernels = check_kernels(str(place), variables, refused=refused, say=say)
    content = {
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine,
        "environment": environment(device=str(place)),
        "kernels": kernels,
        "notes": notes,
    }
    verdict.write(machine, kernels)
    records: tuple[Record, ...] = ()
    if measure:
        say(f"Timing calls of {LENGTHS[0]} to {LENGTHS[-1]} tokens, within {show_seconds(budget_s)}.")
        store = Store(folder / RECORDS)
        _measure(workload, str(place), variables, store, budget_s, say)
        records = tuple(store.records.values())
        strike_slower(kernels, records)
        verdict.write(machine, kernels)
    outcome = GpuCheck(content, records)
    write(folder / VERDICT, content)
    write(folder / PAGE, outcome.page())
    return outcome


def assembler(machine: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """The machine with the assembler that is checked, variables of the children that name it, and notes."""
    reason = verdict.refusal(machine["capability"], machine["ptxas"])
    if reason is None:
        return dict(machine), {}, []
    path = verdict.newer_ptxas()
    if path is None:
        note = f"No kernel was checked: {reason}. Install one and {verdict.export_line()}"
        return dict(machine), {}, [note]
    version = verdict.ptxas_version(path)
    note = f"{reason}: ptxas {version} was used. Fused kernels run after {verdict.export_line()}"
    return {**machine, "ptxas": version}, dict.fromkeys(verdict.PTXAS_VARIABLES, path), [note]


def check_kernels(
    device: str, variables: Mapping[str, str], *, refused: str | None, say: Say
) -> dict[str, Any]:
    """Outcome of each kernel by precision. `refused` is the reason why none may be checked."""
    kernels: dict[str, Any] = {}
    jobs = []
    for kernel, subject in SUBJECTS.items():
        kernels[kernel] = {"source": verdict.source_hash(kernel), "precisions": {}}
        jobs += [(kernel, precision) for precision in subject.bits]
    if refused is not None:
        for kernel, precision in jobs:
            entry = {"outcome": verdict.REFUSED, "tile": "", "reasons": [refused]}
            kernels[kernel]["precisions"][precision] = entry
        return kernels
    memory = available_bytes(device) or 0
    count = max(min(usable_cores(), _MOST_CHECKS, memory // _CHECK_BYTES), 1)
    say(f"Checking {len(jobs)} kernels, {count} at a time.")
    # Compilers of many processes would start a pool of a process per core each.
    threads = str(max(usable_cores() // count, 1))
    variables = {**variables, "OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    start = time.monotonic()
    with ThreadPoolExecutor(count) as pool:
        futures = {pool.submit(judge, *job, device=device, variables=variables): job for job in jobs}
        for future in as_completed(futures):
            (kernel, precision), entry = futures[future], future.result()
            kernels[kernel]["precisions"][precision] = entry
            seconds = show_seconds(time.monotonic() - start)
            reasons = "; ".join(entry["reasons"])
            say(f"After {seconds}: {kernel}, {precision}: {entry['outcome']} {reasons}".rstrip())
    return kernels


def judge(
    kernel: Any,
    precision: str,
    *,
    device: str,
    variables: Mapping[str, str],
    limit_s: float = CHECK_LIMIT_S,
    tiles: Sequence[str] = (),
) -> dict[str, Any]:
    """Outcome of a kernel with the first of its tiles that passes, each tried in a process of its own.

    Args:
        kernel: Name, or a `CheckedKernel` that can be pickled.
        tiles: Tiles in the order of choice; none: all of the kernel.
    """
    reasons: list[str] = []
    answer: dict[str, Any] = {}
    for tile in tiles or verdict.TILES[str(kernel)]:
        call = partial(check_kernel, kernel, precision, device=device, tile=tile)
        try:
            with closing(Process(variables=variables)) as process:
                answer = process.ask(call, limit_s=limit_s)
        except CrashError as ending:
            answer = {"failures": [str(ending)]}
        if answer.get("served") and not answer["failures"]:
            break
        failures = answer.pop("failures") or ["the kernel served no call"]
        reasons += [f"tile {tile or 'of the compiler'}: {text}" for text in failures]
        answer["outcome"] = verdict.FAILED
    answer.pop("failures", None)
    return {"outcome": verdict.PASSED, "tile": tile, "reasons": reasons, **answer}


def _measure(
    workload: Workload, device: str, variables: Mapping[str, str], store: Store, budget_s: float, say: Say
) -> None:
    exact, window, linear = select([YARDSTICK, "window", _LINEAR])
    # Where a kernel serves no call, its refusal is the record.
    named = select([YARDSTICK], {YARDSTICK: {"kernel": KERNELS[1:]}})
    operators = replace(linear, label=_OPERATORS)
    by_operators = {"EFFICIENT_ATTN_KERNELS": "torch"}
    with (
        Measurer(timeout_s=budget_s, variables=variables) as kernels,
        Measurer(timeout_s=budget_s, variables=by_operators) as plain,
    ):

        def points() -> Points:
            dtypes, both = (workload.dtype, "float32"), (False, True)
            for tokens, dtype, causal, backward in product(LENGTHS, dtypes, both, both):
                if dtype == "float32" and (tokens > _LONGEST_SLOW or not causal):
                    continue
                setting = {"causal": causal, "backward": backward, "device": device, "inputs": "gaussian"}
                of_setting = []
                compared = named if tokens <= _LONGEST_SLOW else ()
                for variant in (exact, window, linear, operators, *compared):
                    costs = Costs(
                        measure=plain if variant is operators else kernels,
                        shared={**vars(workload), **setting, "dtype": dtype},
                        rounds=_ROUNDS,
                        l2=COLD,
                    )
                    # Durations of one setting say nothing on another.
                    series = (variant.label, dtype, causal, backward)
                    of_setting.append(replace(costs.point(variant, tokens), series=series))
                yield of_setting

        Engine(
            points, store, point_limit_s=budget_s, budget_s=budget_s, report=lambda step: say(str(step))
        ).run()


def strike_slower(kernels: Mapping[str, Any], records: Sequence[Record]) -> None:
    """Mark kernels that lost to operators at most lengths. Times in bfloat16 decide for float16."""
    device = [(record.case, on_device(record)) for record in records if record.device_times_s]
    timed = {(c.label, c.dtype, c.causal, c.tokens, c.backward): time for c, time in device}
    for kernel, precision, entry in _entries(kernels):
        dtype = "bfloat16" if precision == "float16" else precision
        sides = [
            time_ratio(time, operators).side_of_one
            for key, time in timed.items()
            if key[:3] == (_LINEAR, dtype, _TIMED.get(kernel))
            and (operators := timed.get((_OPERATORS, *key[1:]))) is not None
        ]
        if entry["outcome"] == verdict.PASSED and sum(sides) < 0:
            entry["outcome"] = verdict.SLOWER
            entry["reasons"].append("PyTorch's operators were measured faster at most lengths")
