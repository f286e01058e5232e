"""How far each backend is from exact attention, size by size, beside the mean of the values."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from efficient_attn.experiments.error_points import Point, plan_mse
from efficient_attn.experiments.files import RECORDS, open_folder
from efficient_attn.experiments.folder import describe, only_writer
from efficient_attn.experiments.results import Results
from efficient_attn.measure.environment import environment

# Results looks for the sentences about errors here.
from efficient_attn.report.error_sentences import PAIR_NORMS
from efficient_attn.report.error_sentences import sentences as sentences
from efficient_attn.sweep.case import Record, replace
from efficient_attn.sweep.interrupt import held
from efficient_attn.sweep.questions import Question, ask
from efficient_attn.sweep.records import append
from efficient_attn.sweep.run import Step

DEFAULT_SIZES = (16, 32, 64, 128, 256, 512, 1024)
DEFAULT_INPUTS = ("gaussian", "encoder")

# Performer's figure 4 (Choromanski et al. 2021): sequences of 4096 tokens, vectors of 16.
DEFAULT_TOKENS, DEFAULT_HEAD_DIM = 4096, 16
DEFAULT_NORMS = (0.5, 1.0)
DEFAULT_DATA_SEEDS = 1

# Of pairs whose kernel entry is estimated, in degrees: exp(x·y) above, at and below 1.
DEFAULT_ANGLES = (60.0, 90.0, 120.0)


def mse(
    backends: Sequence[Any] | None = None,
    *,
    sizes: str | Sequence[int] = DEFAULT_SIZES,
    of: str | None = None,
    metric: str | None = None,
    by: str | None = None,
    match: str = "features",
    decompose: bool = False,
    inputs: str | Path | Sequence[str | Path] = DEFAULT_INPUTS,
    norms: Sequence[float] = DEFAULT_NORMS,
    tokens: int = DEFAULT_TOKENS,
    head_dim: int = DEFAULT_HEAD_DIM,
    layers: Sequence[int] | None = None,
    angles: Sequence[float] = DEFAULT_ANGLES,
    draws: int | None = None,
    data_seeds: int = DEFAULT_DATA_SEEDS,
    options: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    seed: int = 0,
    out: str | Path | None = None,
) -> Results:
    """Errors of backends against exact softmax attention in float64.

    Args:
        backends: Names, `file.py:object`, modules or functions f(q, k, v); None stands
            for all that approximate softmax.
        sizes: What the size option of each backend (features, rank, window) is set to.
        of: `output`; `weights` for the attention weights that a backend implies; `kernel` for one entry of
            the softmax kernel, on pairs of a query and a key instead of the inputs.
        metric: A name in `sweep.questions.METRICS`; None: relative errors.
        by: `head` keeps the error of each head too.
        match: What backends have equal amounts of: `features` (their own size), `directions`, `flops`, `time`
            or `memory`; sizes are then features of performer-positive, and what they take is the budget.
        decompose: Tell bias, spread over draws and rounding apart.
        inputs: `gaussian`, `encoder` (the shipped sample), `stitched` (four documents concatenated), or a
            safetensors file; or several of them.
        norms: s of Gaussian inputs, q, k ~ N(0, s² I) before any scale.
        tokens: Of Gaussian inputs; so is head_dim.
        layers: Of the encoder or the file; None stands for all.
        angles: Between the queries and keys of pairs, in degrees; norms are then |x| = |y| for
            x = q/head_dim^¼.
        draws: Independent draws of random features; None: 6, or 64 of a kernel entry.
        data_seeds: Independent draws of Gaussian inputs; features are drawn anew for each of them.
        options: {backend: {option: values}}; every combination is a variant.
        seed: Of the Gaussian inputs, and the first of the draws.
        out: A folder that every record is written to as soon as it exists.
    """
    question = ask(of=of, metric=metric, draws=draws, by=by, match=match, decompose=decompose)
    points = plan_mse(
        backends,
        question,
        sizes=sizes,
        inputs=inputs,
        norms=norms,
        angles=angles,
        tokens=tokens,
        head_dim=head_dim,
        layers=layers,
        data_seeds=data_seeds,
        options=options,
        seed=seed,
    )
    return run_mse(points, question, out=out)


def run_mse(
    points: Sequence[Point],
    question: Question,
    *,
    out: str | Path | None = None,
    command: Sequence[str] = (),
    plan: str | None = None,
    progress: Callable[[Step], None] | None = None,
) -> Results:
    """Measure the points; with `out` everything is written there, records as soon as they exist."""
    folder = None if out is None else open_folder(out, name="out", fresh=True)
    machine = {**environment(command=command), PAIR_NORMS: pair_norms(points, question)}
    with nullcontext() if folder is None else only_writer(folder):
        if folder is not None:
            describe(folder, machine, plan)
        records: list[Record] = []
        interrupted = False
        try:
            for record in _measure(points, question, progress=progress):
                with held():
                    records.append(record)
                    if folder is not None:
                        append(folder / RECORDS, record)
        except KeyboardInterrupt:
            interrupted = True
        results = Results(records, environment=machine, interrupted=interrupted)
        if folder is not None:
            results.save(folder)
    return results


def pair_norms(points: Sequence[Point], question: Question) -> dict[str, float]:
    """{inputs: median of |x + y|² over queries and keys}; the variance of random features grows with it."""
    if question.of == "kernel":
        return {}
    subjects = {id(point.subject): point.subject for point in points}.values()
    return {subject.name: subject.pair_norm for subject in subjects}


def _measure(
    points: Sequence[Point], question: Question, *, progress: Callable[[Step], None] | None
) -> Iterator[Record]:
    from efficient_attn.sweep.accuracy import failed, measure_error
    from efficient_attn.sweep.yardsticks import measure_yardstick

    ranks = max((point.yardstick.rank or 0 for point in points if point.yardstick), default=0)
    start, record = time.monotonic(), None
    for done, point in enumerate(points):
        _tell(progress, done, len(points), start, point.label, record)
        if point.yardstick is not None:
            record = measure_yardstick(point.yardstick, point.subject, question, ranks=ranks)
        elif point.refusal is not None:
            record = failed(point.variant, point.subject, question.of, "unsupported", point.refusal)
        else:
            record = measure_error(
                point.variant, point.subject, question, option=point.option, size=point.size
            )
        if point.match is not None:
            record = replace(
                record,
                matched=question.match,
                matched_amount=point.match.amount,
                matched_size=point.match.reference_size,
            )
        yield record
    _tell(progress, len(points), len(points), start, None, record)


def _tell(
    progress: Callable[[Step], None] | None,
    done: int,
    total: int,
    start: float,
    doing: str | None,
    record: Record | None,
) -> None:
    """Where the run stands; what is left takes as long for each point as those before."""
    if progress is not None:
        passed = time.monotonic() - start
        left = passed / done * (total - done) if done else 0.0
        progress(Step(done=done, total=total, remaining_s=left, doing=doing, record=record))
