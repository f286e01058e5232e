"""What training makes of each backend: one block, the same steps, associative recall."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from efficient_attn.analysis.doubts import DURING
from efficient_attn.errors import OptionError
from efficient_attn.experiments.files import open_folder
from efficient_attn.experiments.folder import Book, Earlier, begin, only_writer
from efficient_attn.experiments.recall_plan import Trainings, plan_recall
from efficient_attn.experiments.recall_task import Course, Task
from efficient_attn.experiments.results import Results
from efficient_attn.measure.conditions import between, moment
from efficient_attn.measure.environment import environment
from efficient_attn.sweep.interrupt import held
from efficient_attn.sweep.plan import Entry
from efficient_attn.sweep.records import Record
from efficient_attn.sweep.run import Step

DEFAULT_SIZES = (32, 64, 128)
DEFAULT_STEPS, DEFAULT_SEEDS = 300, 3
DEFAULT_BATCH, DEFAULT_RATE = 4, 0.01
DEFAULT_NUM_HEADS, DEFAULT_HEAD_DIM = 2, 16


def recall(
    backends: Sequence[Any] | None = None,
    *,
    pairs: int = Task.pairs,
    classes: int = Task.classes,
    queries: int = Task.queries,
    gap: int = Task.gap,
    steps: int = DEFAULT_STEPS,
    seeds: int = DEFAULT_SEEDS,
    sizes: str | Sequence[int] = DEFAULT_SIZES,
    causal: bool = False,
    options: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    batch: int = DEFAULT_BATCH,
    num_heads: int = DEFAULT_NUM_HEADS,
    head_dim: int = DEFAULT_HEAD_DIM,
    rate: float = DEFAULT_RATE,
    threads: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    force_resume: bool = False,
) -> Results:
    """Accuracy of one trained block per backend on associative recall, beside exact attention and controls.

    Every backend starts from the same weights and sees the same sequences in the same order. Random
    features are drawn once for each seed and stay as they are; calibration is made once, before training.

    Args:
        backends: Names, `file.py:object`, modules or functions f(q, k, v); None stands for all that
            approximate softmax, and two kernels that do not.
        pairs: Tokens of a key and a value; a multiple of classes, so that each value comes equally often.
        classes: Different values: chance is 1 / classes.
        queries: Keys of which the value is asked for.
        gap: Empty tokens between pairs and queries, which a short window cannot cross.
        steps: Batches that each block is trained on.
        seeds: Of weights, sequences and random features, from `seed` on.
        sizes: What the size option of each backend (features, rank, window) is set to.
        options: {backend: {option: values}}; every combination is a variant.
        rate: The highest learning rate of AdamW.
        out: A folder that every record is written to as soon as it exists.
        resume: Go on with the run in `out`: what was trained there is not trained again.
        force_resume: Go on even where that run had another torch, other threads or another processor.
    """
    if (resume or force_resume) and out is None:
        raise OptionError("resume needs out, the folder of the run to go on with.")
    task = Task(pairs=pairs, classes=classes, queries=queries, gap=gap)
    asked = plan_recall(
        backends,
        Course(task=task, steps=steps, batch=batch, rate=rate),
        seeds=seeds,
        sizes=sizes,
        options=options,
        causal=causal,
        num_heads=num_heads,
        head_dim=head_dim,
        threads=threads,
        seed=seed,
    )
    return run_recall(asked, out=out, resume=resume, force_resume=force_resume)


def run_recall(
    asked: Trainings,
    *,
    out: str | Path | None = None,
    command: Sequence[str] = (),
    plan: str | None = None,
    progress: Callable[[Step], None] | None = None,
    resume: bool = False,
    force_resume: bool = False,
) -> Results:
    """Train everything; with `out` everything is written there, records as soon as they exist."""
    machine = environment(command=command)
    resume = resume or force_resume
    folder = None if out is None else open_folder(out, name="out", fresh=not resume)
    with nullcontext() if folder is None else only_writer(folder):
        earlier = (
            Earlier()
            if folder is None
            else begin(folder, asked.entries, machine, resume=resume, force=force_resume, plan=plan)
        )
        book, start = Book(folder, earlier.records), moment()
        left = [entry for entry in asked.entries if not book.has(entry.case)]
        interrupted = False
        try:
            _train(left, asked.course, book, progress)
        except KeyboardInterrupt:
            interrupted = True
        machine = dict(earlier.environment or machine)
        machine[DURING] = [*machine.get(DURING, []), between(start, moment(), device="cpu")]
        results = Results(
            book.records,
            environment=machine,
            interrupted=interrupted,
            notes=[*asked.notes, *earlier.notes],
        )
        if folder is not None:
            results.save(folder)
    return results


def _train(
    entries: Sequence[Entry], course: Course, book: Book, progress: Callable[[Step], None] | None
) -> None:
    from efficient_attn.experiments.recall_training import measure

    begun, record = time.monotonic(), None
    for done, entry in enumerate(entries):
        _tell(progress, done, len(entries), begun, f"{entry.case.label}, seed {entry.case.seed}", record)
        record = measure(entry.case, entry.variant.target, course)
        with held():
            book.add(record)
    _tell(progress, len(entries), len(entries), begun, None, record)


def _tell(
    progress: Callable[[Step], None] | None,
    done: int,
    total: int,
    begun: float,
    doing: str | None,
    record: Record | None,
) -> None:
    """Where the run stands; what is left takes as long for each training as those before."""
    if progress is not None:
        left_s = (time.monotonic() - begun) / done * (total - done) if done else 0.0
        progress(Step(done=done, total=total, remaining_s=left_s, doing=doing, record=record))
