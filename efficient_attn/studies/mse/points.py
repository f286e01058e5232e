"""Points of output errors."""

from functools import partial
from typing import Any

from efficient_attn.measure.accuracy import error_case, measure_error
from efficient_attn.measure.calls import attention_flops
from efficient_attn.measure.variants import Variant, sized
from efficient_attn.options import SEED
from efficient_attn.runs.study import Point

# Operations of the metric per token and entry of a head, in the unit of a backend's own count.
_METRIC = 100


def error_point(
    variant: Variant, subject: Any, *, draws: int, metric: str = "relative", threads: int | None = None
) -> Point:
    """Error of a variant, or of uniform attention, on the inputs of a subject."""
    case = error_case(variant, subject, "output", threads=threads)
    cost = (
        attention_flops(case, variant.target) or case.tokens**2 * case.model_dim
    ) + _METRIC * case.tokens * case.model_dim
    return Point(
        case=case,
        measure=partial(measure_error, variant, subject, metric=metric, draws=draws, threads=threads),
        label=f"{case.label} on {case.inputs}",
        series=(sized(case).series, "error"),
        cost=float(cost) * (draws if SEED in variant.options else 1),
    )
