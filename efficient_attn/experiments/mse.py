"""How far each backend is from exact attention, size by size, beside the mean of the values."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efficient_attn.errors import OptionError, UnsupportedError
from efficient_attn.experiments.folder import describe, only_writer
from efficient_attn.experiments.results import (
    RECORDS,
    Results,
    open_folder,
)
from efficient_attn.measure.environment import environment
from efficient_attn.problem import positive_count

# Results looks for the sentences about errors here.
from efficient_attn.report.error_sentences import sentences as sentences
from efficient_attn.sweep.amounts import parse_sizes
from efficient_attn.sweep.interrupt import held
from efficient_attn.sweep.records import Record, append
from efficient_attn.sweep.run import Step
from efficient_attn.sweep.sizes import possible
from efficient_attn.sweep.variants import Variant, select

DEFAULT_SIZES = (16, 32, 64, 128, 256, 512, 1024)
DEFAULT_INPUTS = ("gaussian", "encoder")

# Performer's figure 4 (Choromanski et al. 2021): sequences of 4096 tokens, vectors of 16.
DEFAULT_TOKENS, DEFAULT_HEAD_DIM = 4096, 16
DEFAULT_NORMS = (0.5, 1.0)
DEFAULT_DRAWS = 8


@dataclass(frozen=True, kw_only=True)
class Point:
    """One record to come: a variant on a subject at a size; no variant stands for the yardstick."""

    subject: Any
    variant: Variant | None = None
    option: str | None = None
    size: int | None = None

    @property
    def label(self) -> str:
        """What a progress display says."""
        name = "mean of V" if self.variant is None else self.variant.label
        return f"{name}{'' if self.size is None else f' {self.size}'} on {self.subject.name}"


def mse(
    backends: Sequence[Any] | None = None,
    *,
    sizes: str | Sequence[int] = DEFAULT_SIZES,
    of: str = "output",
    inputs: str | Path | Sequence[str | Path] = DEFAULT_INPUTS,
    norms: Sequence[float] = DEFAULT_NORMS,
    tokens: int = DEFAULT_TOKENS,
    head_dim: int = DEFAULT_HEAD_DIM,
    layers: Sequence[int] | None = None,
    draws: int = DEFAULT_DRAWS,
    options: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    seed: int = 0,
    out: str | Path | None = None,
) -> Results:
    """Errors of backends against exact softmax attention in float64.

    Args:
        backends: Names, `file.py:object`, modules or functions f(q, k, v); None stands for all.
        sizes: What the size option of each backend (features, rank, window) is set to.
        of: `output`, or `weights` for the attention weights that a backend implies.
        inputs: `gaussian`, `encoder` (the shipped sample), `stitched` (its four texts end to end), or a
            safetensors file; or several of them.
        norms: s of Gaussian inputs, q, k ~ N(0, s² I) before any scale.
        tokens: Of Gaussian inputs; so is head_dim.
        layers: Of the encoder or the file; None stands for all.
        draws: Independent draws of random features.
        options: {backend: {option: values}}; every combination is a variant.
        seed: Of the Gaussian inputs, and the first of the draws.
        out: A folder that every record is written to as soon as it exists.
    """
    points = plan_mse(
        backends,
        sizes=sizes,
        of=of,
        inputs=inputs,
        norms=norms,
        tokens=tokens,
        head_dim=head_dim,
        layers=layers,
        draws=draws,
        options=options,
        seed=seed,
    )
    return run_mse(points, of=of, draws=draws, out=out)


def plan_mse(
    backends: Sequence[Any] | None,
    *,
    sizes: str | Sequence[int],
    of: str,
    inputs: str | Path | Sequence[str | Path],
    norms: Sequence[float],
    tokens: int,
    head_dim: int,
    layers: Sequence[int] | None,
    draws: int,
    options: Mapping[str, Mapping[str, Sequence[Any]]] | None,
    seed: int,
) -> tuple[Point, ...]:
    """Every record to come, input by input, the yardstick of an input first."""
    check_request(of=of, draws=draws)
    wanted = parse_sizes(sizes, name="sizes")
    variants = select(backends, options)

    from efficient_attn.sweep.accuracy import try_options
    from efficient_attn.sweep.subjects import subjects

    listed = [inputs] if isinstance(inputs, (str, Path)) else list(inputs)
    chosen = subjects(listed, norms=norms, tokens=tokens, head_dim=head_dim, layers=layers, seed=seed)
    for variant in variants:
        for point in _points(chosen[0], variant, wanted)[:1]:
            try_options(variant, chosen[0], option=point.option, size=point.size)
    return tuple(
        point
        for subject in chosen
        for point in (
            Point(subject=subject),
            *(point for variant in variants for point in _points(subject, variant, wanted)),
        )
    )


def check_request(*, of: str, draws: int) -> None:
    """Refuse what no input could be measured with."""
    if of == "kernel":
        raise UnsupportedError(
            "of cannot be 'kernel' yet; errors of the output and of the weights are measured."
        )
    if of not in ("output", "weights"):
        raise OptionError(f"of is output or weights, not {of!r}.")
    positive_count("draws", draws)


def run_mse(
    points: Sequence[Point],
    *,
    of: str,
    draws: int,
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
            for record in _measure(points, of=of, draws=draws, progress=progress):
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


def _points(subject: Any, variant: Variant, sizes: Sequence[int]) -> list[Point]:
    """The sizes of a variant; one point where it has none, or where its size was set as an option."""
    from efficient_attn.backends import resolve

    option = resolve(variant.target).size_option
    if option is None or f"{option}=" in variant.label:
        return [Point(subject=subject, variant=variant)]
    return [
        Point(subject=subject, variant=variant, option=option, size=size)
        for size in sizes
        if possible(size, tokens=subject.tokens, options=variant.options)
    ]


def _measure(
    points: Sequence[Point], *, of: str, draws: int, progress: Callable[[Step], None] | None
) -> Iterator[Record]:
    from efficient_attn.sweep.accuracy import measure_error, measure_yardstick

    start, record = time.monotonic(), None
    for done, point in enumerate(points):
        _tell(progress, done, len(points), start, point.label, record)
        if point.variant is None:
            record = measure_yardstick(point.subject, of=of)
        else:
            record = measure_error(
                point.variant, point.subject, of=of, draws=draws, option=point.option, size=point.size
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
