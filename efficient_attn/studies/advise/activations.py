"""Points of an advice without a model: attention alone, on activations of a real encoder."""

from collections.abc import Sequence
from functools import partial

from efficient_attn.runner.isolation import Measurer
from efficient_attn.runner.record import Case, Record, replace
from efficient_attn.runner.variants import DENSE, YARDSTICK, Variant
from efficient_attn.studies.advise.findings import PROBE, Findings
from efficient_attn.studies.compare.points import points_of
from efficient_attn.studies.costs import cost_points
from efficient_attn.studies.plan import Point
from efficient_attn.studies.workload import Workload

# The shipped activations, then the longest that they make: four documents laid end to end.
SOURCES = ("encoder", "stitched")


def activation_points(
    variants: Sequence[Variant],
    lengths: Sequence[int],
    workload: Workload,
    findings: Findings,
    *,
    draws: int,
    rounds: int,
    measurer: Measurer,
    limit_bytes: int | None,
) -> list[Point]:
    """Errors at the real length, short calls, predictions, errors at the longest length, then long calls."""
    from efficient_attn.runner.inputs import subjects

    def errors(source: str) -> list[Point]:
        placed = [
            one.placed(dtype=workload.dtype, device=workload.device, causal=workload.causal)
            for one in subjects([source], seed=workload.seed)
        ]
        made = points_of(
            variants, placed, workload, draws=draws, rounds=rounds, measurer=measurer, limit_bytes=None
        )
        order = {one.label: place for place, one in enumerate(variants)}
        return sorted(
            (replace(one, group=source) for one in made if one.case.kind == "error"),
            key=lambda point: order.get(point.case.label, 0),
        )

    real, longest = map(errors, SOURCES)
    case = real[0].case
    shape = replace(workload, num_heads=case.num_heads, head_dim=case.head_dim)
    times = cost_points(
        variants,
        sorted({*PROBE, *lengths}),
        {**vars(shape), "inputs": "gaussian"},
        measure=measurer,
        rounds=rounds,
        kinds=("time",),
        limit_bytes=limit_bytes,
    )
    short = [one for one in times if one.case.tokens <= PROBE[-1]]
    long = [one for one in times if one.case.tokens > PROBE[-1]]
    return [
        *real,
        *short,
        *(_prediction(one.case, findings) for one in long if one.case.backend != YARDSTICK),
        *longest,
        *(
            replace(
                one,
                needed=partial(_needed, one.case, findings),
                # The nearest first, in case the budget ends.
                rank=partial(findings.error, one.case.label),
            )
            for one in long
        ),
    ]


def _prediction(timed: Case, findings: Findings) -> Point:
    """A predicted speed-up; dropped where short calls are missing."""
    case = replace(timed, kind="prediction")

    def predicted() -> Record:
        value, low, high = findings.speed(case.label, case.tokens) or (None, None, None)
        return Record(case=case, predicted_speed=value, predicted_speed_low=low, predicted_speed_high=high)

    return Point(
        case=case,
        measure=predicted,
        group="prediction",
        cost=0.0,
        needed=lambda: findings.speed(case.label, case.tokens) is not None,
    )


def _needed(case: Case, findings: Findings) -> bool:
    """Whether a long call is timed: exact attention, and backends that may be faster and attend at all."""
    label = case.label
    return case.backend == YARDSTICK or not (
        case.backend == DENSE or findings.too_slow(label, case.tokens) or findings.no_nearer(label)
    )
