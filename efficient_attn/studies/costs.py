"""Points of times, peak memory and errors, which several studies measure in the same way."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from efficient_attn.measure import isolation
from efficient_attn.measure.environment import available_bytes
from efficient_attn.measure.isolation import NONE, Measurer, limits_memory
from efficient_attn.measure.memory import predict_bytes
from efficient_attn.measure.record import Record
from efficient_attn.measure.units import parse_bytes, show_bytes
from efficient_attn.measure.variants import Variant, has_address
from efficient_attn.problem import positive_count
from efficient_attn.studies.points import Point
from efficient_attn.studies.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Points of time, peak memory and error of calls that differ in backend and length.

    Attributes:
        shared: Fields common to all cases.
        measure: Measurement of a case, `measure(case, target=…, seconds=…)`.
        rounds: Rounds of a time.
        limit_bytes: Points that are predicted to need more memory are skipped.
        l2: State of the L2 cache for device times; None: no device times.
    """

    shared: Mapping[str, Any]
    measure: Callable[..., Record]
    rounds: int
    limit_bytes: int | None = None
    l2: str | None = None

    def __post_init__(self) -> None:
        positive_count("rounds", self.rounds)

    def time(self, variant: Variant, tokens: int) -> Point:
        """The time of a call, in rounds."""
        return replace(self._point(variant, tokens, "time", self.l2), rounds=self.rounds)

    def memory(self, variant: Variant, tokens: int) -> Point:
        """The peak memory of a call."""
        return self._point(variant, tokens, "memory", None)

    def error(self, variant: Variant, tokens: int) -> Point:
        """The error of an output against exact attention."""
        point = self._point(variant, tokens, "error", None)
        return replace(point, label=f"{variant.label}, {tokens} tokens of {point.case.inputs}, error")

    def _point(self, variant: Variant, tokens: int, kind: str, l2: str | None) -> Point:
        case = variant.case(kind=kind, tokens=tokens, l2=l2, **self.shared)
        return Point(
            case=case,
            measure=partial(self.measure, case, target=variant.target),
            series=(case.label, case.of),
            cost=case.batch * float(tokens) ** variant.time_growth,
            skip=too_large(predict_bytes(case, variant.memory_growth), self.limit_bytes),
        )


def shape_of_subject(subject: Any) -> dict[str, Any]:
    """Fields of a case that the heads of a subject decide."""
    return {
        "num_heads": subject.activations.q.shape[1],
        "num_kv_heads": subject.num_kv_heads,
        "head_dim": subject.head_dim,
        "causal": subject.causal,
    }


def measurer_for(
    variants: Sequence[Variant],
    workload: Workload,
    *,
    isolate: str | None,
    timeout_s: float,
    memory_limit: str | int,
) -> tuple[Measurer, int | None, list[str]]:
    """The measurer of these variants, its memory limit in bytes, and remarks.

    Objects that exist in this process only are measured here, and all others with them.
    """
    isolate = isolation.DEFAULT_ISOLATION if isolate is None else isolate
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
    unknown = " Its available memory is unknown, so none was skipped: memory_limit in Python takes an amount."
    return measurer, limit, [remark + (unknown if limit is None else "")]


def too_large(needed: int, limit: int | None) -> str | None:
    """Reason not to measure a point that needs more bytes than the limit."""
    if limit is None or needed <= limit:
        return None
    return (
        f"needs about {show_bytes(needed)}, the limit is {show_bytes(limit)} (raise memory_limit in Python)"
    )
