"""Curves of language models trained on the same bytes: who is lower after as many steps or seconds."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from efficient_attn.analysis.curves import YARDSTICK
from efficient_attn.sweep.records import Record

# Of a normal distribution 95 % lies within so many standard deviations; means over windows are nearly normal.
_NORMAL_95 = 1.96

# Bits are shown with three decimals; what they do not show is called no difference.
_SHOWN = 5e-4

# What the models of one group have in common.
_SHARED = ("inputs", "tokens", "batch", "layers", "num_heads", "head_dim", "device", "threads", "seed")


class Mean(NamedTuple):
    """The mean over held-out windows, and half of the 95 % interval for the mean over all such windows."""

    value: float
    half: float

    @property
    def is_clear(self) -> bool:
        """Whether it is a difference that can be seen, and zero lies outside of the interval."""
        return abs(self.value) > max(self.half, _SHOWN)


class TrainingCurve(NamedTuple):
    """One model in training, in bits per byte; None is what cannot be said.

    Attributes:
        steps: Those after which it was evaluated.
        seconds_s: Of training until then.
        final: The last evaluation.
        beyond_exact: How much more that is than exact attention had on the same windows after as many steps.
        at_common_time: After the seconds that the fastest took for all its steps, if evaluated by then.
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
        """Of training alone."""
        return self.steps[-1] / self.seconds_s[-1] if self.steps and self.seconds_s[-1] > 0 else None


class TrainingRun(NamedTuple):
    """Models that differ by their attention alone, the lowest first.

    Attributes:
        common_s: Seconds of training that all of them had: those of the fastest.
    """

    curves: tuple[TrainingCurve, ...]
    common_s: float | None

    @property
    def exact(self) -> TrainingCurve | None:
        """That of exact attention, if it was evaluated."""
        return next((one for one in self.curves if one.backend == YARDSTICK and one.final), None)


def training_runs(records: Iterable[Record]) -> tuple[TrainingRun, ...]:
    """One for each text, size of the model and seed."""
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in {record.case.key: record for record in records if record.case.kind == "train"}.values():
        groups.setdefault(tuple(getattr(record.case, name) for name in _SHARED), []).append(record)
    return tuple(map(_run, groups.values()))


def training_rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """One flat row for each model."""
    return [_row(run, one) for run in training_runs(records) for one in run.curves]


def _run(records: list[Record]) -> TrainingRun:
    exact = next((record for record in records if record.case.backend == YARDSTICK), None)
    seconds = [_whole(record.train_seconds_s) for record in records]
    common_s = min((own[-1] for own in seconds if own), default=None)
    curves = [_curve(record, exact, common_s) for record in records]
    return TrainingRun(tuple(sorted(curves, key=_place)), common_s)


def _curve(record: Record, exact: Record | None, common_s: float | None) -> TrainingCurve:
    steps = tuple(int(step) for step in _whole(record.train_steps))
    seconds, held_out = _whole(record.train_seconds_s), _whole(record.held_out_bits_per_byte)
    known = len(steps) == len(seconds) == len(held_out) > 0
    steps, seconds, held_out = (steps, seconds, held_out) if known else ((), (), ())
    return TrainingCurve(
        label=record.case.label,
        backend=record.case.backend,
        steps=steps,
        seconds_s=seconds,
        held_out=held_out,
        final=_mean(_windows(record)) if known else None,
        beyond_exact=None if exact is None or exact is record else _beyond(record, exact),
        at_common_time=_at(common_s, seconds, held_out) if known and common_s is not None else None,
        record=record,
    )


def _at(common_s: float, seconds_s: tuple[float, ...], values: tuple[float, ...]) -> float | None:
    """The value at a moment, on the straight line between two evaluations; None before the first one."""
    return float(np.interp(common_s, seconds_s, values)) if common_s >= seconds_s[0] else None


def _beyond(record: Record, exact: Record) -> Mean | None:
    """On the same windows, so that what makes a window hard takes no part."""
    own, theirs = _windows(record), _windows(exact)
    same = (record.train_steps or (0,))[-1] == (exact.train_steps or (0,))[-1]
    return _mean(own - theirs) if same and len(own) == len(theirs) else None


def _mean(values: np.ndarray) -> Mean | None:
    if len(values) < 2:
        return None
    return Mean(float(values.mean()), _NORMAL_95 * float(values.std(ddof=1)) / math.sqrt(len(values)))


def _windows(record: Record) -> np.ndarray:
    return np.asarray(_whole(record.held_out_bits_per_byte_windows), dtype=float)


def _whole(values: tuple[float, ...] | None) -> tuple[float, ...]:
    """The values; none where one of them is null in the file."""
    return () if values is None or None in values else values


def _place(one: TrainingCurve) -> tuple[bool, float]:
    return one.final is None, one.final.value if one.final else 0.0


def _row(run: TrainingRun, one: TrainingCurve) -> dict[str, Any]:
    record, final, beyond = one.record, one.final, one.beyond_exact
    return {
        "label": one.label,
        "backend": one.backend,
        **{name: getattr(record.case, name) for name in _SHARED},
        "step": one.steps[-1] if one.steps else None,
        "train_s": one.seconds_s[-1] if one.seconds_s else None,
        "steps_per_s": one.steps_per_s,
        "held_out_bits_per_byte": final.value if final else None,
        "interval_half": final.half if final else None,
        "beyond_exact": beyond.value if beyond else None,
        "beyond_exact_half": beyond.half if beyond else None,
        "common_s": run.common_s,
        "held_out_bits_per_byte_at_common_s": one.at_common_time,
        "state_bytes": record.state_bytes,
        "parameter_bytes": record.parameter_bytes,
        "status": record.status,
        "reason": record.reason,
    }
