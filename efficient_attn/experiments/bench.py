"""How long each backend takes and how much memory it needs, length by length."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from efficient_attn.analysis.curves import YARDSTICK
from efficient_attn.analysis.doubts import DURING, doubts
from efficient_attn.errors import OptionError, UnsupportedError
from efficient_attn.experiments.files import open_folder
from efficient_attn.experiments.folder import Book, Earlier, begin, only_writer
from efficient_attn.experiments.results import Results
from efficient_attn.experiments.workload import Workload, workloads
from efficient_attn.measure.conditions import between, moment
from efficient_attn.measure.environment import available_bytes, environment
from efficient_attn.problem import positive_count
from efficient_attn.sweep.amounts import parse_bytes, parse_sizes
from efficient_attn.sweep.isolate import DEFAULT_ISOLATION, DEFAULT_TIMEOUT_S, NONE, POINT, measuring
from efficient_attn.sweep.plan import Entry, plan
from efficient_attn.sweep.process import START_S
from efficient_attn.sweep.run import ROUNDS, Step, run
from efficient_attn.sweep.variants import Variant, ceiling, has_address, is_ours, select

DEFAULT_TOKENS = (256, 512, 1024, 2048, 4096)
DEFAULT_MEMORY_LIMIT = "70%"


def bench(
    backends: Sequence[Any] | None = None,
    *,
    tokens: str | Sequence[int] = DEFAULT_TOKENS,
    of: str | Sequence[str] = "attention",
    layers: int | None = None,
    backward: bool = False,
    causal: bool = False,
    batch: int = 1,
    num_heads: str | int | Sequence[int] = 8,
    head_dim: int | None = None,
    model_dim: int | None = None,
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    options: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    budget_s: float | None = None,
    memory_limit: str | int = DEFAULT_MEMORY_LIMIT,
    seed: int = 0,
    out: str | Path | None = None,
    isolate: str = DEFAULT_ISOLATION,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    rounds: int = ROUNDS,
    resume: bool = False,
    force_resume: bool = False,
) -> Results:
    """Time and peak memory of backends on Gaussian q, k, v, with fused `exact` always among them.

    Measured is in another process, whose end ends nothing else; in this one if a backend is an object that
    exists nowhere else, such as a function of a notebook or a name registered there: all are treated alike.

    Args:
        backends: Names, `file.py:object`, modules or functions f(q, k, v); None stands
            for all that approximate softmax.
        tokens: Lengths, as numbers or as text such as `256:4096:x2`.
        of: `attention`; or `block`, with projections and feed-forward part; or `encoder`, a stack of blocks;
            or several, `attention,block`.
        layers: Blocks of an encoder.
        backward: Measure forward and backward pass together.
        num_heads: One number or several, `4,8,16`.
        head_dim: 64, unless there is a model_dim, which is num_heads · head_dim.
        dtype: `auto` is float32 on the CPU and bfloat16 on CUDA.
        options: {backend: {option: values}}; every combination is a variant.
        budget_s: Seconds of measuring, without drawing; what would not fit into the rest is skipped.
        memory_limit: Bytes, or a share of the available memory; what would need more is skipped, and what
            takes more in a process of its own is out of memory.
        out: A folder that every record is written to as soon as it exists.
        isolate: `reuse` keeps the process while it is healthy, `point` takes a new one for every turn,
            `none` measures in this one.
        timeout_s: A point that takes longer in another process, all its turns together, is ended.
        rounds: How often the times of a length are taken up, all backends by turns.
        resume: Go on with the run in `out`: what is measured there is not measured again.
        force_resume: Go on even where that run had another torch, other threads or another processor.
    """
    if (resume or force_resume) and out is None:
        raise OptionError("resume needs out, the folder of the run to go on with.")
    asked = Workload(
        layers=layers,
        batch=batch,
        causal=causal,
        backward=backward,
        dtype=dtype,
        device=device,
        threads=threads,
        seed=seed,
    )
    settled = workloads(asked, of=of, num_heads=num_heads, head_dim=head_dim, model_dim=model_dim)
    entries = plan_bench(backends, tokens, settled, options=options, memory_limit=memory_limit)
    return run_bench(
        entries,
        budget_s=budget_s,
        out=out,
        isolate=isolate,
        timeout_s=timeout_s,
        rounds=rounds,
        resume=resume,
        force_resume=force_resume,
    )


def plan_bench(
    backends: Sequence[Any] | None,
    tokens: str | Sequence[int],
    workloads: Sequence[Workload],
    *,
    options: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    memory_limit: str | int = DEFAULT_MEMORY_LIMIT,
    names: tuple[str, str] = ("tokens", "memory_limit"),
) -> tuple[Entry, ...]:
    """Every case of a benchmark, length by length, and what would not fit into memory; nothing runs.

    Args:
        names: What messages call the arguments tokens and memory_limit.
    """
    lengths = parse_sizes(tokens, name=names[0])
    # Calls are made where their time is limited, and what becomes of them is a row.
    chosen = select(backends, options, rehearse=False)
    if all(variant.backend != YARDSTICK for variant in chosen):
        chosen = (*select([YARDSTICK]), *chosen)
    limit = parse_bytes(memory_limit, name=names[1], available=available_bytes(workloads[0].device))
    entries: list[Entry] = []
    for workload in workloads:
        _try_options(chosen, workload, max(lengths))
        yardsticks = () if workload.of == "attention" else (ceiling(),)
        shared = {**vars(workload), "inputs": "gaussian"}
        entries += plan((*yardsticks, *chosen), lengths, shared, memory_limit=limit)
    # What stands beside each other is measured at one time.
    return tuple(sorted(entries, key=lambda entry: entry.case.tokens))


def _try_options(variants: Sequence[Variant], workload: Workload, longest: int) -> None:
    """Build each variant of ours whose options were set, once: a value that never works is a wrong request.

    What others wrote is built only where its time is limited.
    """
    from efficient_attn.backends import build

    for variant in variants:
        if variant.label == variant.backend or not is_ours(variant.target):
            continue
        try:
            build(
                variant.target,
                head_dim=workload.head_dim,
                num_heads=workload.num_heads,
                max_tokens=longest,
                causal=workload.causal,
                **variant.options,
            )
        except UnsupportedError:
            # No promise was made: that is a result, and is recorded as one.
            continue


def run_bench(
    entries: Sequence[Entry],
    *,
    budget_s: float | None = None,
    out: str | Path | None = None,
    command: Sequence[str] = (),
    plan: str | None = None,
    progress: Callable[[Step], None] | None = None,
    isolate: str = DEFAULT_ISOLATION,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    rounds: int = ROUNDS,
    resume: bool = False,
    force_resume: bool = False,
) -> Results:
    """Measure the entries; with `out` everything is written there, records as soon as they exist."""
    positive_count("rounds", rounds)
    here = [entry.variant.label for entry in entries if not has_address(entry.variant.target)]
    # A driver of CUDA reserves more addresses than any limit allows.
    limit_bytes = entries[0].limit_bytes if entries[0].case.device == "cpu" else None
    measurer = measuring(NONE if here else isolate, timeout_s=timeout_s, limit_bytes=limit_bytes)
    machine = environment(command=command, device=entries[0].case.device)
    notes = [not_isolated(here[0])] if here and isolate != NONE else []
    resume = resume or force_resume
    folder = None if out is None else open_folder(out, name="out", fresh=not resume)
    with nullcontext() if folder is None else only_writer(folder):
        earlier = (
            Earlier()
            if folder is None
            else begin(
                folder,
                [entry.case for entry in entries],
                machine,
                resume=resume,
                force=force_resume,
                plan=plan,
            )
        )
        book = Book(folder, earlier.records)
        start = moment()
        with measurer as measure:
            complete = run(
                [entry for entry in entries if not book.has(entry.case)],
                emit=book.add,
                progress=progress,
                budget_s=budget_s,
                rounds=rounds,
                timeout_s=timeout_s,
                measure=measure,
                start_s=START_S if isolate == POINT else 0.0,
            )
        machine = dict(earlier.environment or machine)
        during = between(start, moment(), device=entries[0].case.device)
        machine[DURING] = [*machine.get(DURING, []), during]
        results = Results(
            book.records,
            environment=machine,
            interrupted=not complete,
            notes=[*notes, *earlier.notes, *doubts(book.records, machine)],
        )
        if folder is not None:
            results.save(folder)
    return results


def not_isolated(label: str) -> str:
    """What is said where a backend could not be measured in another process."""
    return f"Nothing was isolated: {label!r} exists in this process only; name it as file.py:object."
