"""Points of a comparison: errors backend by backend, interleaved times, peak memory."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from efficient_attn.measure.clock import COLD
from efficient_attn.measure.isolation import Measurer
from efficient_attn.measure.variants import YARDSTICK, Variant, joint_name
from efficient_attn.options import SEED
from efficient_attn.stats.candidates import exact_operations
from efficient_attn.studies.costs import Costs, shape_of_subject
from efficient_attn.studies.points import Point, Steps
from efficient_attn.studies.workload import Workload

# Durations relative to that of an operation of a backend, building included: of exact attention in float64,
# and of the error per entry of the output.
_EXACT, _COMPARING = 0.5, 50.0


def error_points(
    variants: Sequence[Variant], subjects: Sequence[Any], workload: Workload, *, draws: int
) -> dict[str, list[Point]]:
    """Errors by label, one per subject: exact attention, the mean of V, then the fewest operations first."""
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
                measure=partial(measure, subject=subject, draws=draws, threads=threads),
                series=(variant.label, "error"),
                cost=cost * (draws if SEED in variant.options else 1),
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


def steps(
    variants: Sequence[Variant],
    inputs: Sequence[Sequence[Any]],
    workload: Workload,
    *,
    draws: int,
    rounds: int,
    measurer: Measurer,
    limit_bytes: int | None,
) -> Steps:
    """For each of the inputs the errors, then the costs of the backends that have one."""
    from efficient_attn.measure.accuracy import MEAN

    for subjects in inputs:
        working = []
        errors = error_points(variants, subjects, workload, draws=draws)
        named = {variant.label: variant for variant in (MEAN, *variants)}
        for label, points in errors.items():
            for point in points:
                # After a failure the other layers are left out.
                if (yield point).status != "ok":
                    break
            else:
                working.append(named[label])
        first = subjects[0]
        inputs_name = joint_name([subject.name for subject in subjects])
        costs = Costs(
            shared={**vars(workload), **shape_of_subject(first), "inputs": inputs_name},
            measure=measurer,
            rounds=rounds,
            limit_bytes=limit_bytes,
            l2=COLD if workload.device.startswith("cuda") else None,
        )
        yield [costs.time(variant, first.tokens) for variant in working]
        for variant in working:
            yield costs.memory(variant, first.tokens)


@contextmanager
def handing_over(measurer: Measurer, inputs: Sequence[Sequence[Any]]) -> Iterator[None]:
    """Times and memory are measured on q, k, v of the middle layer of each of the inputs, through files."""
    from efficient_attn.measure.inputs import write_given

    with measurer, tempfile.TemporaryDirectory() as folder:
        for number, subjects in enumerate(inputs):
            path = Path(folder) / f"{number}.safetensors"
            write_given(path, subjects[len(subjects) // 2])
            measurer.inputs[joint_name([subject.name for subject in subjects])] = str(path)
        yield
