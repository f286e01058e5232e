"""Points of times and peak memory, which several studies measure in the same way."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from efficient_attn.measure.environment import available_bytes
from efficient_attn.problem import positive_count
from efficient_attn.runner.isolation import NONE, Measurer, limits_memory
from efficient_attn.runner.predicted_bytes import predict_bytes
from efficient_attn.runner.record import Record
from efficient_attn.runner.units import parse_bytes, show_bytes
from efficient_attn.runner.variants import Variant, has_address
from efficient_attn.studies.plan import Point
from efficient_attn.studies.workload import Workload

# Calls of one measurement of memory: a warm-up, the checked call and the traced one.
_MEMORY_CALLS = 3


def cost_points(
    variants: Sequence[Variant],
    lengths: Sequence[int],
    shared: Mapping[str, Any],
    *,
    measure: Callable[..., Record],
    rounds: int,
    kinds: Sequence[str] = ("time", "memory"),
    limit_bytes: int | None = None,
    l2: str | None = None,
) -> list[Point]:
    """One point per length, kind and variant; the times of one length and execution are interleaved.

    Args:
        shared: Fields common to all cases.
        measure: Measurement of a case, `measure(case, target=…, seconds=…)`.
        limit_bytes: Points that are predicted to need more memory are skipped.
        l2: State of the L2 cache for device times; None: no device times.
    """
    positive_count("rounds", rounds)
    points = []
    for tokens, kind, variant in itertools.product(lengths, kinds, variants):
        timed = kind == "time"
        case = variant.case(kind=kind, tokens=tokens, **shared, l2=l2 if timed else None)
        needed = predict_bytes(case, variant.memory_growth)
        points.append(
            Point(
                case=case,
                measure=partial(measure, case, target=variant.target),
                rounds=rounds if timed else None,
                calls=None if timed else _MEMORY_CALLS,
                group=(tokens, variant.execution),
                series=(case.label, case.of),
                cost=case.batch * float(tokens) ** variant.time_growth,
                skip=too_large(needed, limit_bytes),
            )
        )
    return points


def measurer_for(
    variants: Sequence[Variant],
    workload: Workload,
    *,
    isolate: str,
    timeout_s: float,
    memory_limit: str | int,
) -> tuple[Measurer, int | None, list[str]]:
    """The measurer of these variants, its memory limit in bytes, and remarks.

    Objects that exist in this process only are measured here, and all others with them.
    """
    limit = parse_bytes(memory_limit, name="memory_limit", available=available_bytes(workload.device))
    here = [variant.label for variant in variants if not has_address(variant.target)]
    # A driver of CUDA reserves more addresses than any limit allows.
    limit_bytes = limit if workload.device == "cpu" else None
    measurer = Measurer(NONE if here else isolate, timeout_s=timeout_s, limit_bytes=limit_bytes)
    if isolate == NONE:
        return measurer, limit, []
    if here:
        remark = f"Nothing was isolated: {here[0]!r} exists in this process only; name it as file.py:object."
        return measurer, limit, [remark]
    if workload.device != "cpu" or limits_memory():
        return measurer, limit, []
    remark = "This system enforces no memory limit: points are skipped by their predicted memory alone."
    unknown = " Its available memory is unknown, so none was skipped: --memory-limit takes an amount."
    return measurer, limit, [remark + (unknown if limit is None else "")]


def too_large(needed: int, limit: int | None) -> str | None:
    """Reason not to measure a point that needs more bytes than the limit."""
    if limit is None or needed <= limit:
        return None
    return (
        f"needs about {show_bytes(needed)}, the limit is {show_bytes(limit)} (raise it with --memory-limit)"
    )
