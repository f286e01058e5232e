"""Error, time and memory of every backend on the same q, k, v at one length."""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from efficient_attn.analysis.candidates import CANDIDATES
from efficient_attn.analysis.comparison import DEFAULT_MAX_ERROR, MAX_ERROR
from efficient_attn.analysis.doubts import DURING, doubts
from efficient_attn.experiments.bench import not_isolated
from efficient_attn.experiments.contest import (
    DEFAULT_DRAWS,
    DEFAULT_HEAD_DIM,
    DEFAULT_INPUTS,
    DEFAULT_MEMORY_LIMIT,
    DEFAULT_NUM_HEADS,
    DEFAULT_ROUNDS,
    ORACLE_RANKS,
    Contest,
    contest,
)
from efficient_attn.experiments.files import open_folder
from efficient_attn.experiments.folder import Book, describe, only_writer
from efficient_attn.experiments.results import Results
from efficient_attn.experiments.workload import Workload
from efficient_attn.measure.conditions import between, moment
from efficient_attn.measure.environment import environment
from efficient_attn.problem import positive_count
from efficient_attn.sweep.isolate import DEFAULT_ISOLATION, DEFAULT_TIMEOUT_S, NONE, measuring
from efficient_attn.sweep.plan import Entry, plan
from efficient_attn.sweep.questions import ask
from efficient_attn.sweep.records import Record
from efficient_attn.sweep.run import Step, run
from efficient_attn.sweep.variants import Variant, has_address


def compare(
    backends: Sequence[Any] | None = None,
    *,
    inputs: str | Path = DEFAULT_INPUTS,
    layer: int | None = None,
    tokens: int | None = None,
    max_error: float = DEFAULT_MAX_ERROR,
    options: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    draws: int = DEFAULT_DRAWS,
    norm: float = 1.0,
    num_heads: int = DEFAULT_NUM_HEADS,
    head_dim: int = DEFAULT_HEAD_DIM,
    dtype: str = "float32",
    device: str = "auto",
    threads: int | None = None,
    rounds: int = DEFAULT_ROUNDS,
    memory_limit: str | int = DEFAULT_MEMORY_LIMIT,
    isolate: str = DEFAULT_ISOLATION,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    seed: int = 0,
    out: str | Path | None = None,
) -> Results:
    """Error, time and peak memory of backends on the same q, k, v, beside exact attention and the mean of V.

    Args:
        backends: Names, `file.py:object`, modules or functions f(q, k, v); None stands for exact attention
            and all that is meant to come near it.
        inputs: `encoder` (the shipped sample), `stitched` (four documents concatenated), `gaussian`, or a
            safetensors file.
        layer: The only layer of the encoder or the file; None: errors on all layers, times on one of them.
        tokens: Number of tokens, the first ones; None: all.
        max_error: The relative output error that the sentence asks about.
        options: {backend: {option: values}}; every combination is a variant.
        draws: Independent draws of random features.
        norm: s of Gaussian inputs, q, k ~ N(0, s² I); num_heads and head_dim are theirs too.
        rounds: How often times are taken up, all backends by turns.
        out: A folder that every record is written to as soon as it exists.
    """
    asked = contest(
        backends,
        inputs=inputs,
        layer=layer,
        tokens=tokens,
        max_error=max_error,
        options=options,
        draws=draws,
        norm=norm,
        workload=Workload(
            num_heads=num_heads, head_dim=head_dim, dtype=dtype, device=device, threads=threads, seed=seed
        ),
        memory_limit=memory_limit,
    )
    return run_compare(asked, out=out, rounds=rounds, isolate=isolate, timeout_s=timeout_s)


def run_compare(
    asked: Contest,
    *,
    out: str | Path | None = None,
    command: Sequence[str] = (),
    plan: str | None = None,
    progress: Callable[[Step], None] | None = None,
    isolate: str = DEFAULT_ISOLATION,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    rounds: int = DEFAULT_ROUNDS,
) -> Results:
    """Measure the errors, then what has one is timed; with `out` everything is written there."""
    positive_count("rounds", rounds)
    device = asked.workload.device
    machine = {
        **environment(command=command, device=device),
        MAX_ERROR: asked.max_error,
        CANDIDATES: [variant.label for variant in asked.variants],
    }
    folder = None if out is None else open_folder(out, name="out", fresh=True)
    with nullcontext() if folder is None else only_writer(folder):
        if folder is not None:
            describe(folder, machine, plan)
        book, start, complete = Book(folder, {}), moment(), False
        try:
            measured = _errors(asked, book, progress)
            complete = _costs(asked, measured, book, progress, isolate, timeout_s, rounds)
        except KeyboardInterrupt:
            pass
        machine[DURING] = [between(start, moment(), device=device)]
        results = Results(
            book.records,
            environment=machine,
            interrupted=not complete,
            notes=[*_notes(asked, isolate), *doubts(book.records, machine)],
        )
        if folder is not None:
            results.save(folder)
    return results


def _errors(asked: Contest, book: Book, progress: Callable[[Step], None] | None) -> list[Variant]:
    """Measure the error of everything; the variants, with the mean of the values, that have one."""
    from efficient_attn.sweep import yardsticks as make
    from efficient_attn.sweep.accuracy import measure_error

    question = ask(of="output", draws=asked.draws)
    mean = make.mean_of_values()
    baselines = (mean, *map(make.oracle, asked.ranks))
    made: list[tuple[Variant, Callable[[], Record]]] = []
    for subject in asked.subjects:
        made += [
            (
                one.variant,
                partial(make.measure_yardstick, one, subject, question, ranks=max(ORACLE_RANKS)),
            )
            for one in baselines
        ]
        made += [(variant, partial(measure_error, variant, subject, question)) for variant in asked.variants]
    begun, worked, record = time.monotonic(), Counter[str](), None
    for done, (variant, measure) in enumerate(made):
        if progress is not None:
            left_s = (time.monotonic() - begun) / done * (len(made) - done) if done else 0.0
            step = Step(done=done, total=asked.points, remaining_s=left_s, doing=variant.label, record=record)
            progress(step)
        record = measure()
        book.add(record)
        worked[variant.label] += record.status == "ok"
    # A backend that fails on one layer has no error to be set beside a time.
    return [one for one in (mean.variant, *asked.variants) if worked[one.label] == len(asked.subjects)]


def _costs(
    asked: Contest,
    variants: Sequence[Variant],
    book: Book,
    progress: Callable[[Step], None] | None,
    isolate: str,
    timeout_s: float,
    rounds: int,
) -> bool:
    """Time and memory of the variants on the tensors that their errors were measured on."""
    entries = _entries(asked, variants)
    known = len(book.records)
    skipped = asked.points - known - len(entries)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "qkv.safetensors"
        _hand_over(asked, path)
        measurer = measuring(
            NONE if _only_here(asked.variants) else isolate,
            timeout_s=timeout_s,
            limit_bytes=asked.limit_bytes if asked.workload.device == "cpu" else None,
            inputs=str(path),
        )
        with measurer as measure:
            return run(
                entries,
                emit=book.add,
                progress=None if progress is None else _after(known + skipped, progress),
                rounds=rounds,
                timeout_s=timeout_s,
                measure=measure,
            )


def _only_here(variants: Sequence[Variant]) -> list[str]:
    """What no other process finds."""
    return [variant.label for variant in variants if not has_address(variant.target)]


def _notes(asked: Contest, isolate: str) -> list[str]:
    here = _only_here(asked.variants)
    return [not_isolated(here[0])] if here and isolate != NONE else []


def _entries(asked: Contest, variants: Sequence[Variant]) -> tuple[Entry, ...]:
    subject, workload = asked.subject, asked.workload
    q = subject.activations.q
    shared = {
        **{name: getattr(workload, name) for name in ("batch", "dtype", "device", "threads")},
        "num_heads": q.shape[1],
        "head_dim": q.shape[-1],
        "inputs": asked.inputs,
        "seed": subject.seed,
    }
    return plan(variants, [subject.tokens], shared, memory_limit=asked.limit_bytes)


def _hand_over(asked: Contest, path: Path) -> None:
    from efficient_attn.sweep.given import write_given

    write_given(path, asked.subject.activations, scale=asked.subject.scale)


def _after(done: int, progress: Callable[[Step], None]) -> Callable[[Step], None]:
    """A display of steps that counts those that were made before."""
    return lambda step: progress(replace(step, done=done + step.done, total=done + step.total))
