"""Points of a comparison: errors backend by backend, interleaved times, peak memory."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from efficient_attn.measure.queued import COLD
from efficient_attn.options import SEED
from efficient_attn.runner.isolation import Measurer
from efficient_attn.runner.layers import joint_name
from efficient_attn.runner.record import Case
from efficient_attn.runner.variants import YARDSTICK, Variant
from efficient_attn.stats.candidates import exact_operations
from efficient_attn.studies.costs import cost_points
from efficient_attn.studies.plan import Point
from efficient_attn.studies.workload import Workload

# Durations relative to that of an operation of a backend, building included: of exact attention in float64,
# and of the error per entry of the output.
_EXACT, _COMPARING = 0.5, 50.0

# A backward pass takes about twice the operations of the forward pass.
_BACKWARD = 3


def points_of(
    variants: Sequence[Variant],
    subjects: Sequence[Any],
    workload: Workload,
    *,
    draws: int,
    rounds: int,
    measurer: Measurer,
    limit_bytes: int | None,
) -> list[Point]:
    """Errors of exact attention, the mean of V and the backends, the fewest operations first; then costs."""
    from efficient_attn.runner.accuracy import MEAN, error_case, measure_error, measure_mean
    from efficient_attn.runner.counting import known_flops

    first, threads = subjects[0], workload.threads or 1
    entries = first.activations.q.numel()
    work = {MEAN.label: float(entries)}
    for variant in variants:
        case = error_case(variant, first, "output")
        # As many operations as exact attention for backends that count none.
        work[variant.label] = known_flops(case, variant.target) or exact_operations(case)
    exact, *others = sorted(variants, key=lambda one: (one.backend != YARDSTICK, work[one.label]))
    points: list[Point] = []
    last: dict[str, Case] = {}
    for variant in (exact, MEAN, *others):
        measure = measure_mean if variant is MEAN else partial(measure_error, variant)
        operations = work[variant.label] + _COMPARING * entries
        if variant is exact:
            # The float64 output that all errors are computed from is computed with the first of them.
            operations += _EXACT * exact_operations(error_case(variant, first, "output"))
        for subject in subjects:
            case = error_case(variant, subject, "output", threads=threads)
            point = Point(
                case=case,
                measure=partial(measure, subject=subject, draws=draws, threads=threads),
                group="errors",
                series=(variant.label, "error"),
                cost=operations * (draws if SEED in variant.options else 1),
                # After a failure the other layers are left out.
                needs=last.get(variant.label),
            )
            points.append(point)
            last[variant.label] = case
    fields = {
        "num_heads": first.activations.q.shape[1],
        "num_kv_heads": first.num_kv_heads,
        "head_dim": first.head_dim,
        "causal": first.causal,
        "inputs": joint_name([subject.name for subject in subjects]),
    }
    timed = cost_points(
        (MEAN, *variants),
        [first.tokens],
        {**vars(workload), **fields},
        measure=measurer,
        rounds=rounds,
        limit_bytes=limit_bytes,
        l2=COLD if workload.device.startswith("cuda") else None,
    )
    factor = _BACKWARD if workload.backward else 1
    # A backend that fails on one layer has no error that could be compared with a time.
    return points + [
        replace(one, needs=last[one.case.label], series=one.case.label, cost=factor * work[one.case.label])
        for one in timed
    ]


@contextmanager
def handing_over(measurer: Measurer, inputs: Sequence[Sequence[Any]]) -> Iterator[None]:
    """Times and memory are measured on q, k, v of the middle layer of each of the inputs, through files."""
    from efficient_attn.runner.inputs import write_given

    with measurer, tempfile.TemporaryDirectory() as folder:
        for number, subjects in enumerate(inputs):
            path = Path(folder) / f"{number}.safetensors"
            write_given(path, subjects[len(subjects) // 2])
            measurer.inputs[joint_name([subject.name for subject in subjects])] = str(path)
        yield
