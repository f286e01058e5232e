"""Errors of attention alone on the layers of a shipped model, the fewest operations first."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from efficient_attn.measure.variants import YARDSTICK, Variant
from efficient_attn.options import SEED
from efficient_attn.stats.candidates import exact_operations
from efficient_attn.studies.study import Point
from efficient_attn.studies.workload import Workload

# Draws of random features.
_DRAWS = 2

# Durations relative to that of an operation of a backend, building included: of exact attention in float64,
# and of the error per entry of the output.
_EXACT, _COMPARING = 0.5, 50.0


def error_points(
    variants: Sequence[Variant], subjects: Sequence[Any], workload: Workload
) -> dict[str, list[Point]]:
    """Errors by label, one per subject: exact and uniform attention, then the fewest operations first."""
    from efficient_attn.measure.accuracy import MEAN, error_case, measure_error, measure_mean

    first, threads = subjects[0], workload.threads or 1
    entries = first.activations.q.numel()
    work = operations(variants, first)
    exact, *others = sorted(variants, key=lambda one: (one.backend != YARDSTICK, work[one.label]))
    points = {}
    for variant in (exact, MEAN, *others):
        measure = measure_mean if variant is MEAN else partial(measure_error, variant)
        cost = work[variant.label] + _COMPARING * entries
        if variant is exact:
            # The float64 output that all errors are computed from is computed with the first of them.
            cost += _EXACT * exact_operations(error_case(variant, first, "output"))
        points[variant.label] = [
            Point(
                case=error_case(variant, subject, "output", threads=threads),
                measure=partial(measure, subject=subject, draws=_DRAWS, threads=threads),
                series=(variant.label, "error"),
                cost=cost * (_DRAWS if SEED in variant.options else 1),
            )
            for subject in subjects
        ]
    return points


def operations(variants: Sequence[Variant], subject: Any) -> dict[str, float]:
    """Operations of a call by label; as many as of exact attention for backends that count none."""
    from efficient_attn.measure.accuracy import MEAN, error_case
    from efficient_attn.measure.calls import known_flops

    cases = {variant.label: (error_case(variant, subject, "output"), variant) for variant in variants}
    work = {
        label: float(known_flops(case, variant.target) or exact_operations(case))
        for label, (case, variant) in cases.items()
    }
    return {MEAN.label: float(subject.activations.q.numel()), **work}
