"""Comparisons from records: errors and costs that were measured on the same inputs."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from efficient_attn.runner.layers import single_names
from efficient_attn.runner.records import Record
from efficient_attn.runner.sizes import FORMER_BASELINES, SEED
from efficient_attn.stats.median import Middle, middle
from efficient_attn.stats.rounds import call_time
from efficient_attn.studies.compare.analysis import Comparison, Contender
from efficient_attn.studies.compare.plan import DEFAULT_MAX_ERROR, MAX_ERROR

# Fields common to all cases of one comparison.
_SHARED = ("tokens", "batch", "num_heads", "head_dim", "causal", "dtype", "seed")


def comparisons(records: Iterable[Record]) -> tuple[Comparison, ...]:
    """One per input, length, pass and number of threads for which both errors and times were measured."""
    latest = {record.case.key: record for record in records if _belongs(record)}
    errors: dict[tuple[object, ...], list[Record]] = {}
    costs: dict[tuple[object, ...], dict[tuple[int, bool], list[Record]]] = {}
    for record in latest.values():
        case = record.case
        # Errors depend on the kind of device only, costs on the device.
        key = (case.device.partition(":")[0], *(getattr(case, name) for name in _SHARED))
        if case.kind == "error":
            errors.setdefault((case.inputs, *key), []).append(record)
        else:
            machine = (case.threads, case.backward)
            costs.setdefault((case.inputs, *key), {}).setdefault(machine, []).append(record)
    return tuple(
        _comparison([*wrong, *group])
        for (inputs, *key), groups in costs.items()
        if (wrong := [one for name in single_names(str(inputs)) for one in errors.get((name, *key), ())])
        for group in groups.values()
        if any(record.case.kind == "time" for record in group)
    )


def asked_error(environment: Mapping[str, Any]) -> float:
    """The error limit of a run, from its environment."""
    known = environment.get(MAX_ERROR)
    known = known if isinstance(known, (int, float)) and not isinstance(known, bool) else 0
    return known if 0 < known < float("inf") else DEFAULT_MAX_ERROR


def comparison_rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """One flat row per backend and comparison, with error, time and memory."""
    return [_row(compared, one) for compared in comparisons(records) for one in compared.contenders]


def without_compared(records: Sequence[Record], compared: Sequence[Comparison]) -> list[Record]:
    """Records that belong to no comparison."""
    shown = {record.case.key for one in compared for record in one.records}
    return [record for record in records if record.case.key not in shown]


def _row(compared: Comparison, one: Contender) -> dict[str, Any]:
    time_s, error = one.time_s, one.error
    shared = {name: getattr(compared.case, name) for name in ("inputs", *_SHARED, "device", "threads")}
    return {
        "label": one.label,
        "backend": one.backend,
        **shared,
        "output_relative_error": error.median if error else None,
        "error_low": error.low if error else None,
        "error_high": error.high if error else None,
        "draws": error.samples if error else None,
        "time_s": time_s.median if time_s else None,
        "time_low_s": time_s.low if time_s else None,
        "time_high_s": time_s.high if time_s else None,
        "peak_bytes": one.peak_bytes,
        "on_time_front": one in compared.front("time_s"),
        "on_memory_front": one in compared.front("peak_bytes"),
        "reason": "; ".join(f"{bad.status}: {bad.reason}" for bad in one.failed) or None,
    }


def _belongs(record: Record) -> bool:
    """Whether the record measures the output or a call of attention alone."""
    about = {"error": "output", "time": "attention", "memory": "attention"}
    return about.get(record.case.kind) == record.case.of


def _comparison(records: Sequence[Record]) -> Comparison:
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record.case.backend not in FORMER_BASELINES:
            groups.setdefault(record.case.label, []).append(record)
    case = next(record.case for record in records if record.case.kind == "time")
    layers = len(single_names(case.inputs))
    found = [_contender(label, group, layers) for label, group in groups.items()]
    return Comparison(case, tuple(sorted(found, key=_place)), tuple(records))


def _contender(label: str, group: Sequence[Record], layers: int) -> Contender:
    errors = [record for record in group if record.case.kind == "error"]
    time, memory = (
        next((record for record in group if record.case.kind == kind), None) for kind in ("time", "memory")
    )
    timed = time if time is not None and time.status == "ok" and time.times_s else None
    return Contender(
        label=label,
        backend=group[0].case.backend,
        error=_error_over([_error_of(record) for record in errors]) if len(errors) == layers else None,
        time_s=call_time(timed) if timed is not None else None,
        timed=timed,
        peak_bytes=None if memory is None else memory.peak_bytes,
        drawn=SEED in group[0].case.options,
        calibrated_on=next((one.calibrated_on for one in group if one.calibrated_on), None),
        failed=tuple(record for record in group if record.status != "ok"),
        layers=layers,
    )


def _error_over(layers: Sequence[Middle | None]) -> Middle | None:
    """The error of a single layer, or the median and range over several; None if a layer has none."""
    known = [one for one in layers if one is not None]
    if not known or len(known) < len(layers):
        return None
    if len(known) == 1:
        return known[0]
    medians = [one.median for one in known]
    return Middle(median(medians), min(medians), max(medians), min(one.samples for one in known))


def _error_of(record: Record) -> Middle | None:
    """Median over draws; None if a draw was not finite, which is null in the file."""
    draws = record.output_relative_error_draws or ()
    if record.status != "ok" or record.output_relative_error is None or None in draws:
        return None
    return middle(draws or [record.output_relative_error])


def _place(one: Contender) -> tuple[bool, float, float]:
    time_s = one.cost("time_s")
    return time_s is None, time_s or 0.0, one.error.median if one.error else float("inf")
