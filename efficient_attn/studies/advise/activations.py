"""Points of an advice without a model: attention alone, on activations of real models."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from efficient_attn.runner.isolation import Measurer
from efficient_attn.runner.record import Case, Record, replace
from efficient_attn.runner.variants import DENSE, YARDSTICK, Variant
from efficient_attn.studies.advise.findings import PROBE, Findings, shape_of
from efficient_attn.studies.compare.points import points_of
from efficient_attn.studies.costs import cost_points
from efficient_attn.studies.plan import Point
from efficient_attn.studies.workload import Workload

# The shipped activations.
SOURCES = ("encoder", "decoder")


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
    """Errors at the full lengths of the models, short calls and predictions, long calls, shorter lengths.

    The beginning of a causal sequence is a real sequence: its activations do not depend on later tokens.
    """
    from efficient_attn.runner.inputs import subjects

    order = {one.label: place for place, one in enumerate(variants)}

    def errors(read: Sequence[Any], tokens: int) -> list[Point]:
        place = {"dtype": workload.dtype, "device": workload.device, "causal": workload.causal}
        placed = [one.placed(tokens=tokens, **place) for one in read]
        made = points_of(
            variants, placed, workload, draws=draws, rounds=rounds, measurer=measurer, limit_bytes=None
        )
        found = (replace(one, group=one.case.inputs) for one in made if one.case.kind == "error")
        return sorted(found, key=lambda point: order.get(point.case.label, 0))

    def times(errors: Sequence[Point]) -> tuple[list[Point], list[Point]]:
        # A backend that failed has no error that could be compared with a time.
        known = {point.case.label: point.case for point in errors}
        case = errors[0].case
        shape = {
            "num_heads": case.num_heads,
            "num_kv_heads": case.num_kv_heads,
            "head_dim": case.head_dim,
            "causal": case.causal,
        }
        made = cost_points(
            variants,
            sorted({*PROBE, *lengths}),
            {**vars(workload), **shape, "inputs": "gaussian"},
            measure=measurer,
            rounds=rounds,
            kinds=("time",),
            limit_bytes=limit_bytes,
        )
        made = [replace(one, needs=known[one.case.label]) for one in made]
        short = [one for one in made if one.case.tokens <= PROBE[-1]]
        long = [one for one in made if one.case.tokens > PROBE[-1]]
        predictions = [_prediction(one.case, findings) for one in long if one.case.backend != YARDSTICK]
        nearer = [replace(one, needed=partial(_is_candidate, one.case, findings)) for one in short]
        return [*nearer, *predictions], [_long(one, findings) for one in long]

    models = []
    for source in SOURCES:
        read = subjects([source], seed=workload.seed)
        most = read[0].tokens
        shorter = [tokens for tokens in lengths if tokens < most and read[0].causal]
        full = errors(read, most)
        models.append((full, *times(full), [one for tokens in shorter for one in errors(read, tokens)]))
    return [point for step in zip(*models, strict=True) for points in step for point in points]


def _long(point: Point, findings: Findings) -> Point:
    """A long call, dropped where it is not needed; the nearest first, in case the budget ends."""
    case = point.case
    rank = partial(findings.error, case.label, shape_of(case))
    return replace(point, needed=partial(_needed, case, findings), rank=rank)


def _prediction(timed: Case, findings: Findings) -> Point:
    """A predicted speed-up; dropped where short calls are missing."""
    case, shape = replace(timed, kind="prediction"), shape_of(timed)

    def predicted() -> Record:
        value, low, high = findings.speed(case.label, case.tokens, shape) or (None, None, None)
        return Record(case=case, predicted_speed=value, predicted_speed_low=low, predicted_speed_high=high)

    return Point(
        case=case,
        measure=predicted,
        group="prediction",
        cost=0.0,
        needed=lambda: findings.speed(case.label, case.tokens, shape) is not None,
    )


def _is_candidate(case: Case, findings: Findings) -> bool:
    """Whether a backend is exact attention, or not known to err as much as the mean of the values."""
    return case.backend == YARDSTICK or not findings.no_nearer(case.label, shape_of(case))


def _needed(case: Case, findings: Findings) -> bool:
    """Whether a long call is timed: exact attention, and backends that may be faster and attend at all."""
    slower = case.backend == DENSE or findings.too_slow(case.label, case.tokens, shape_of(case))
    return case.backend == YARDSTICK or (_is_candidate(case, findings) and not slower)
