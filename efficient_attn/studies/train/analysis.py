"""Learning curves of models trained on the same sequences, compared at equal steps and equal time."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from efficient_attn.runner.records import Record
from efficient_attn.stats.curves import YARDSTICK, grouped

# Normal 95 % quantile; means over windows are nearly normal.
_NORMAL_95 = 1.96

# Bits are shown with three decimals; smaller differences count as none.
_SHOWN = 5e-4

# Fields common to the models of one group.
_SHARED = ("inputs", "tokens", "batch", "layers", "num_heads", "head_dim", "device", "threads", "seed")


class Mean(NamedTuple):
    """Mean over held-out sequences, with the half-width of its 95 % interval."""

    value: float
    half: float

    @property
    def is_clear(self) -> bool:
        """Whether the difference is visible in print and its interval excludes zero."""
        return abs(self.value) > max(self.half, _SHOWN)


class TrainingCurve(NamedTuple):
    """Bits per byte or token of one model in training; None: unknown.

    Attributes:
        steps: Steps of the evaluations.
        seconds_s: Seconds of training before each evaluation.
        final: The last evaluation.
        beyond_exact: Difference from exact attention on the same windows after as many steps.
        at_common_time: Value after the total time of the fastest model, if evaluated by then.
    """

    label: str
    backend: str
    steps: tuple[int, ...]
    seconds_s: tuple[float, ...]
    held_out: tuple[float, ...]
    final: Mean | None
    beyond_exact: Mean | None
    at_common_time: float | None
    record: Record

    @property
    def steps_per_s(self) -> float | None:
        """Training steps per second, without evaluations."""
        return self.steps[-1] / self.seconds_s[-1] if self.steps and self.seconds_s[-1] > 0 else None


class TrainingRun(NamedTuple):
    """Models that differ only by their attention, the lowest first.

    Attributes:
        common_s: Training time that all models reached: the total time of the fastest.
    """

    curves: tuple[TrainingCurve, ...]
    common_s: float | None

    @property
    def exact(self) -> TrainingCurve | None:
        """Exact attention."""
        return next((one for one in self.curves if one.backend == YARDSTICK), None)

    @property
    def unit(self) -> str:
        """`byte` or `token`."""
        return unit_of(self.curves[0].record)


def percent(share: float) -> str:
    """A share as `99.99%`, rounded down: nothing but all is 100 %."""
    # Errors of floating-point numbers are far below the sixth decimal, and no share of counted tokens is.
    return f"{math.floor(round(share * 1e4, 6)) / 100:.2f}%"


def unit_of(record: Record) -> str:
    """Name of a token in the quantities of a record: sequences of an encoder-decoder are not bytes."""
    return "token" if record.case.of == "encoder-decoder" else "byte"


def held_out_of(record: Record, samples: str = "") -> tuple[float, ...] | None:
    """Bits per byte or token of each evaluation; with samples="_windows" of each sequence of the last."""
    found: tuple[float, ...] | None = getattr(record, f"held_out_bits_per_{unit_of(record)}{samples}")
    return found


def training_runs(records: Iterable[Record]) -> tuple[TrainingRun, ...]:
    """One per task, text, model size and seed."""
    return tuple(map(_run, grouped((one for one in records if one.case.kind == "train"), *_SHARED)))


def _run(records: list[Record]) -> TrainingRun:
    exact = next((record for record in records if record.case.backend == YARDSTICK), None)
    seconds = [_whole(record.train_seconds_s) for record in records]
    common_s = min((own[-1] for own in seconds if own), default=None)
    curves = [_curve(record, exact, common_s) for record in records]
    return TrainingRun(
        tuple(sorted(curves, key=lambda one: one.final.value if one.final else math.inf)), common_s
    )


def _curve(record: Record, exact: Record | None, common_s: float | None) -> TrainingCurve:
    steps = tuple(int(step) for step in _whole(record.train_steps))
    seconds, held_out = _whole(record.train_seconds_s), _whole(held_out_of(record))
    known = len(steps) == len(seconds) == len(held_out) > 0
    steps, seconds, held_out = (steps, seconds, held_out) if known else ((), (), ())
    reached = None
    if known and common_s is not None and common_s >= seconds[0]:
        # Linear interpolation between evaluations.
        reached = float(np.interp(common_s, seconds, held_out))
    return TrainingCurve(
        label=record.case.label,
        backend=record.case.backend,
        steps=steps,
        seconds_s=seconds,
        held_out=held_out,
        final=_mean(_windows(record)) if known else None,
        beyond_exact=None if exact is None or exact is record else _beyond(record, exact),
        at_common_time=reached,
        record=record,
    )


def _beyond(record: Record, exact: Record) -> Mean | None:
    """Paired difference on the same windows, which removes their difficulty."""
    own, theirs = _windows(record), _windows(exact)
    same = (record.train_steps or (0,))[-1] == (exact.train_steps or (0,))[-1]
    return _mean(own - theirs) if same and len(own) == len(theirs) else None


def _mean(values: np.ndarray) -> Mean | None:
    if len(values) < 2:
        return None
    return Mean(float(values.mean()), _NORMAL_95 * float(values.std(ddof=1)) / math.sqrt(len(values)))


def _windows(record: Record) -> np.ndarray:
    return np.asarray(_whole(held_out_of(record, "_windows")), dtype=float)


def _whole(values: tuple[float, ...] | None) -> tuple[float, ...]:
    """The values; empty if one of them is null in the file."""
    return () if values is None or None in values else values
