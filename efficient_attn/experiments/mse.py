"""How far each backend is from exact attention, size by size, beside the mean of the values."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from efficient_attn.errors import UnsupportedError
from efficient_attn.experiments.folder import describe, only_writer
from efficient_attn.experiments.results import (
    RECORDS,
    Results,
    open_folder,
)
from efficient_attn.measure.environment import environment

# Results looks for the sentences about errors here.
from efficient_attn.report.error_sentences import sentences as sentences
from efficient_attn.sweep.amounts import parse_sizes
from efficient_attn.sweep.interrupt import held
from efficient_attn.sweep.questions import Question, ask
from efficient_attn.sweep.records import Record, append
from efficient_attn.sweep.run import Step
from efficient_attn.sweep.sizes import SEED, possible
from efficient_attn.sweep.variants import Variant, select

DEFAULT_SIZES = (16, 32, 64, 128, 256, 512, 1024)
DEFAULT_INPUTS = ("gaussian", "encoder")

# Performer's figure 4 (Choromanski et al. 2021): sequences of 4096 tokens, vectors of 16.
DEFAULT_TOKENS, DEFAULT_HEAD_DIM = 4096, 16
DEFAULT_NORMS = (0.5, 1.0)
DEFAULT_DATA_SEEDS = 1

# Of pairs whose kernel entry is estimated, in degrees: exp(x·y) above, at and below 1.
DEFAULT_ANGLES = (60.0, 90.0, 120.0)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One record to come: a variant, or a yardstick, on a subject at a size."""

    subject: Any
    variant: Variant
    yardstick: Any = None
    option: str | None = None
    size: int | None = None
    match: Any = None
    refusal: str | None = None

    @property
    def label(self) -> str:
        """What a progress display says."""
        return f"{self.variant.label}{'' if self.size is None else f' {self.size}'} on {self.subject.name}"


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
        backends: Names, `file.py:object`, modules or functions f(q, k, v); None stands for all.
        sizes: What the size option of each backend (features, rank, window) is set to.
        of: `output`; `weights` for the attention weights that a backend implies; `kernel` for one entry of
            the softmax kernel, on pairs of a query and a key instead of the inputs.
        metric: A name in `sweep.questions.METRICS`; None: relative errors.
        by: `head` keeps the error of each head too.
        match: What backends have equal amounts of: `features` (their own size), `directions`, `flops`, `time`
            or `memory`; sizes are then features of performer-positive, and what they take is the budget.
        decompose: Tell bias, spread over draws and rounding apart.
        inputs: `gaussian`, `encoder` (the shipped sample), `stitched` (its four texts end to end), or a
            safetensors file; or several of them.
        norms: s of Gaussian inputs, q, k ~ N(0, s² I) before any scale.
        tokens: Of Gaussian inputs; so is head_dim.
        layers: Of the encoder or the file; None stands for all.
        angles: Between the queries and keys of pairs, in degrees; norms are then |x| = |y| for
            x = q/head_dim^¼.
        draws: Independent draws of random features; None: 8, or 64 of a kernel entry.
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


def plan_mse(
    backends: Sequence[Any] | None,
    question: Question,
    *,
    sizes: str | Sequence[int],
    inputs: str | Path | Sequence[str | Path],
    norms: Sequence[float],
    angles: Sequence[float],
    tokens: int,
    head_dim: int,
    layers: Sequence[int] | None,
    data_seeds: int,
    options: Mapping[str, Mapping[str, Sequence[Any]]] | None,
    seed: int,
) -> tuple[Point, ...]:
    """Every record to come, input by input, the yardsticks of an input first."""
    wanted = parse_sizes(sizes, name="sizes")
    variants = select(backends, options)
    if question.of == "kernel":
        variants = tuple(variant for variant in variants if backends is not None or _estimates(variant))

    from efficient_attn.sweep.accuracy import try_options
    from efficient_attn.sweep.subjects import pair_subjects, subjects

    listed = [inputs] if isinstance(inputs, (str, Path)) else list(inputs)
    if question.of == "kernel":
        chosen = pair_subjects(norms, angles, head_dim=head_dim, seed=seed)
    else:
        chosen = subjects(
            listed,
            norms=norms,
            tokens=tokens,
            head_dim=head_dim,
            layers=layers,
            seed=seed,
            data_seeds=data_seeds,
        )
    for variant in variants:
        for point in _points(chosen[0], variant, wanted[:1], "features"):
            try_options(variant, chosen[0], option=point.option, size=point.size)
    return tuple(
        point
        for subject in chosen
        for point in (
            *_yardsticks(subject, question, wanted),
            *(point for variant in variants for point in _points(subject, variant, wanted, question.match)),
        )
    )


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
    machine = environment(command=command)
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


def _yardsticks(subject: Any, question: Question, sizes: Sequence[int]) -> list[Point]:
    """The mean of the values first; no row of the others' weights lacks a positive sum."""
    from efficient_attn.sweep import yardsticks as make

    if question.of == "kernel":
        # What a kernel entry is read beside follows from its norm and angle alone.
        return []
    made = [make.mean_of_values()]
    if question.metrics != ("unsafe",):
        made += [make.taylor(order, subject.head_dim) for order in make.TAYLOR_ORDERS]
        made += [make.oracle(rank) for rank in make.ranks_of(sizes, subject.tokens)]
    return [Point(subject=subject, variant=one.variant, yardstick=one, size=one.rank) for one in made]


def _estimates(variant: Variant) -> bool:
    """Whether a backend draws features that estimate the kernel of softmax."""
    from efficient_attn.backends import resolve

    return SEED in variant.options and resolve(variant.target).capabilities.approximates_softmax


def _points(subject: Any, variant: Variant, sizes: Sequence[int], match: str) -> list[Point]:
    """The sizes of a variant; one point where it has none, or where its size was set as an option."""
    from efficient_attn.backends import resolve

    option = resolve(variant.target).size_option
    if option is None or f"{option}=" in variant.label:
        return [Point(subject=subject, variant=variant)]
    if match != "features":
        return _matched_points(subject, variant, option, sizes, match)
    return [
        Point(subject=subject, variant=variant, option=option, size=size)
        for size in sizes
        if possible(size, tokens=subject.tokens, options=variant.options)
    ]


def _matched_points(
    subject: Any, variant: Variant, option: str, sizes: Sequence[int], quantity: str
) -> list[Point]:
    """The sizes of a variant at which it takes as much as the reference does at these."""
    from efficient_attn.sweep.match import matched

    try:
        found = matched(variant, subject, option, sizes, quantity)
    except UnsupportedError as refusal:
        return [Point(subject=subject, variant=variant, refusal=str(refusal))]
    return [Point(subject=subject, variant=variant, option=option, size=one.size, match=one) for one in found]


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
