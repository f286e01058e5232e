"""Errors, speeds and peak memory of all backends in one setting, from records."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.variants import (
    CEILING,
    DENSE,
    GAUSSIAN,
    UNIFORM_ATTENTION,
    YARDSTICK,
    is_yardstick,
    joint_name,
    single_names,
)
from efficient_attn.runs.store import over_budget
from efficient_attn.stats import estimates
from efficient_attn.stats.predicted_time import extrapolated
from efficient_attn.stats.speeds import speed_ups

# Relative errors below this are rounding of float32.
ROUNDING = 1e-4

# Rows that approximate nothing.
REFERENCES = (UNIFORM_ATTENTION, "linear-relu")

# Share of the visible keys from which a backend reads all.
_ALL_KEYS = 0.999

# Fields of a setting of calls, and those that errors on the same shape share.
_SHAPE = ("num_heads", "num_kv_heads", "head_dim", "causal", "dtype", "seed")
_SETTING = (*_SHAPE, "of", "layers", "batch", "backward", "device", "threads", "inputs", "execution")


class Error(NamedTuple):
    """Relative output error on the layer where it is largest.

    Attributes:
        low, high: Range over several layers, or on a single one the 95 % interval over draws.
        mse: Mean squared error on the layer where that is largest.
        correlation: Correlation with exact attention on the layer where that is smallest, None if undefined.
        bland: Whether the output deviates too little from uniform attention on any layer.
        keys: Share of the visible keys that are read one by one, None if none are.
    """

    worst: float
    low: float
    high: float
    layers: int
    mse: float | None
    correlation: float | None
    bland: bool
    keys: float | None

    @property
    def reads_all(self) -> bool:
        """Whether all keys are read, as in exact attention."""
        return self.keys is not None and self.keys > _ALL_KEYS


class Row(NamedTuple):
    """Measurements of a backend or reference by length.

    Attributes:
        errors: Where all layers of the length were measured.
        largest: Largest error of any layer at any length.
        speeds: Speed-ups over exact attention; predicted ones have no samples.
        state_bytes, weights_bytes: At the longest length.
        missing: Lengths with a layer without an error.
        failed: Records of failures and refusals.
    """

    label: str
    backend: str
    errors: Mapping[int, Error]
    largest: float | None
    times: Mapping[int, Record]
    speeds: Mapping[int, estimates.Typical]
    peaks: Mapping[int, int]
    state_bytes: int | None
    weights_bytes: int | None
    missing: tuple[int, ...]
    failed: tuple[Record, ...]

    @property
    def is_candidate(self) -> bool:
        """Whether it stands in for exact attention: neither a baseline nor a reference."""
        return self.backend not in (*REFERENCES, DENSE, CEILING) and not self.is_exact

    @property
    def is_exact(self) -> bool:
        """Whether it is the baseline of the speeds."""
        return self.label.partition(" ·")[0] == YARDSTICK

    def has_error_at(self, tokens: int) -> bool:
        """Whether a measured error also holds at a length."""
        return not self.errors or any(n >= tokens or not error.reads_all for n, error in self.errors.items())

    @property
    def speed(self) -> estimates.Typical | None:
        """Speed-up at the longest length."""
        return self.speeds[max(self.speeds)] if self.speeds else None

    @property
    def outcome(self) -> str:
        """Outcome of the measured speed-up at the longest length."""
        measured = [tokens for tokens, speed in self.speeds.items() if speed.samples]
        return self.speeds[max(measured)].outcome if measured else estimates.OPEN


class Comparison(NamedTuple):
    """All measurements of one shape.

    Attributes:
        case: Case of a call, or of an error without calls.
        inputs: Inputs of the errors, all layers together; None without errors.
        rows: Exact attention, other backends from the smallest error on, references.
        tokens: Longest length at which the errors of all layers are known, 0 without errors.
    """

    case: Case
    inputs: str | None
    rows: tuple[Row, ...]
    tokens: int
    records: tuple[Record, ...]

    @property
    def longest(self) -> int:
        """Longest length with a speed, 0 without speeds."""
        return max((tokens for row in self.rows for tokens in row.speeds), default=0)

    def row(self, label: str) -> Row | None:
        """The row of that name."""
        return next((row for row in self.rows if row.label == label), None)

    def within(self, limit: float, tokens: int) -> tuple[list[Row], list[Row], list[Row]]:
        """Candidates within the limit at that length, beyond it, and with errors not known."""
        rows = [row for row in self.rows if row.is_candidate and row.largest is not None]
        beyond = [row for row in rows if (row.largest or 0.0) > limit and row.has_error_at(tokens)]
        broken = [row for row in rows if any(record.case.kind == "error" for record in row.failed)]
        rest = [row for row in rows if row not in beyond and row not in broken]
        near = [row for row in rest if not row.missing and row.has_error_at(tokens)]
        return near, beyond, [row for row in rest if row not in near]


def comparisons(records: Iterable[Record]) -> list[Comparison]:
    """One for each setting of calls and each model with errors on the same shape, in order of the records."""
    records = [*{record.case.key: record for record in records}.values()]
    errors = [r for r in records if (r.case.kind, r.case.of) == ("error", "output")]
    calls = [r for r in records if r.case.kind in ("time", "memory")]
    speeds: dict[tuple[Any, ...], dict[str, Mapping[int, estimates.Typical]]] = {}
    for group in estimates.grouped(calls, "of", "layers"):
        for row in speed_ups(estimates.curves(group, "time_s")):
            speeds.setdefault(_setting(row.case), {})[row.case.label] = row.ratios
    settings, joined = list[Comparison](), set[str]()
    for group in estimates.grouped(calls, *_SETTING):
        case = group[0].case
        for source in _models(errors, case) or [[]]:
            joined |= {record.case.key for record in source}
            settings.append(_comparison(case, group, source, speeds.get(_setting(case), {})))
    alone = [record for record in errors if record.case.key not in joined]
    for group in estimates.grouped(alone, *_SHAPE):
        settings += [_comparison(group[0].case, [], source, {}) for source in _by_model(group)]
    return settings


def _setting(case: Case) -> tuple[Any, ...]:
    return tuple(getattr(case, name) for name in _SETTING)


def _shape(case: Case) -> tuple[Any, ...]:
    # Errors depend on the kind of device alone.
    return (case.device.partition(":")[0], *(getattr(case, name) for name in _SHAPE))


def _models(errors: Sequence[Record], case: Case) -> list[list[Record]]:
    """Errors on the shape of a call, by model; on the inputs of the call if it names any."""
    if case.of != "attention" or case.execution is not None:
        return []
    alike = [record for record in errors if _shape(record.case) == _shape(case)]
    if case.inputs != GAUSSIAN:
        alike = [record for record in alike if record.case.inputs in single_names(case.inputs)]
    return _by_model(alike)


def _by_model(errors: Sequence[Record]) -> list[list[Record]]:
    models: dict[str, list[Record]] = {}
    for record in errors:
        models.setdefault(record.case.inputs.partition("(")[0], []).append(record)
    return [*models.values()]


def _comparison(
    case: Case,
    calls: Sequence[Record],
    errors: Sequence[Record],
    speeds: Mapping[str, Mapping[int, estimates.Typical]],
) -> Comparison:
    layers: dict[int, set[str]] = {}
    for record in errors:
        layers.setdefault(record.case.tokens, set()).add(record.case.inputs)
    most = max(map(len, layers.values()), default=0)
    times = {
        group[0].case.label: {r.case.tokens: r for r in group if r.status == "ok" and r.times_s}
        for group in estimates.grouped((r for r in calls if r.case.kind == "time"), "label")
    }
    exact = next((times[r.case.label] for r in calls if is_yardstick(r.case) and r.case.label in times), {})
    rows = []
    for group in estimates.grouped((*errors, *calls), "label"):
        label = group[0].case.label
        ratios = {**_predicted(group, times.get(label, {}), exact), **speeds.get(label, {})}
        # A file may hold times whose ratio no float can hold.
        ratios = {tokens: ratio for tokens, ratio in ratios.items() if 0 < ratio.median < math.inf}
        if group[0].case.backend == YARDSTICK and times.get(label) is exact:
            ratios = {tokens: estimates.Typical(1.0, 1.0, 1.0, 1) for tokens in exact}
        statuses = {record.status for record in group}
        if "ok" in statuses or "unsupported" not in statuses:
            rows.append(_row(group, layers, times.get(label, {}), dict(sorted(ratios.items()))))
    tokens = max((n for row in rows for n in row.errors if len(layers[n]) == most), default=0)
    names = [*dict.fromkeys(record.case.inputs for record in errors)]
    inputs = joint_name(names) if names else None
    rows.sort(key=lambda row: _place(row, tokens))
    return Comparison(case, inputs, tuple(rows), tokens, (*errors, *calls))


def _predicted(
    group: Sequence[Record], times: Mapping[int, Record], exact: Mapping[int, Record]
) -> dict[int, estimates.Typical]:
    """Speed-ups where the budget left out a time, each time extrapolated from its own lengths."""
    left = {r.case.tokens for r in group if r.case.kind == "time" and over_budget(r)}
    sides = [{n: estimates.call_time(record).median for n, record in side.items()} for side in (exact, times)]
    speeds = {}
    for tokens in left | (times.keys() - exact.keys() if exact else set()):
        exact_s, own_s = (extrapolated(side, tokens) for side in sides)
        if exact_s is not None and own_s is not None:
            value, low, high = exact_s[0] / own_s[0], exact_s[1] / own_s[2], exact_s[2] / own_s[1]
            speeds[tokens] = estimates.Typical(value, low, high, samples=0)
    return speeds


def _row(
    group: Sequence[Record],
    layers: Mapping[int, set[str]],
    times: Mapping[int, Record],
    speeds: Mapping[int, estimates.Typical],
) -> Row:
    measured = [r for r in group if r.case.kind == "error" and r.status == "ok"]
    by_length = {part[0].case.tokens: part for part in estimates.grouped(measured, "tokens")}
    errors = {n: e for n, part in by_length.items() if (e := _error(part, len(layers[n]))) is not None}
    memory = [r for r in group if r.case.kind == "memory" and r.status == "ok"]
    last = max(memory, key=lambda record: record.case.tokens, default=None)
    return Row(
        label=group[0].case.label,
        backend=group[0].case.backend,
        errors=dict(sorted(errors.items())),
        largest=max(_medians(measured, "output_relative_error"), default=None),
        times=times,
        speeds=speeds,
        peaks={r.case.tokens: r.peak_bytes for r in group if r.peak_bytes is not None},
        state_bytes=last.state_bytes if last else None,
        weights_bytes=last.parameter_bytes if last else None,
        missing=tuple(sorted(layers.keys() - errors.keys())),
        failed=tuple(r for r in group if r.status not in ("ok", "skipped")),
    )


def _error(records: Sequence[Record], layers: int) -> Error | None:
    """Error over all layers of a length, or None if one is missing or not finite."""
    values = _medians(records, "output_relative_error")
    if len(values) != layers:
        return None
    low, high = min(values), max(values)
    draws = records[0].measured.get("output_relative_error_draws")
    if layers == 1 and draws:
        _, low, high, _ = estimates.middle(draws)
    mses, correlations = (_medians(records, name) for name in ("output_mse", "output_correlation"))
    # Exact attention reads all keys by its name.
    keys = [r.density for r in records if r.density is not None and r.case.backend != YARDSTICK]
    return Error(
        worst=max(values),
        low=low,
        high=high,
        layers=layers,
        mse=max(mses, default=None),
        correlation=min(correlations, default=None),
        bland=any(map(estimates.bland, records)),
        keys=max(keys, default=None),
    )


def _medians(records: Sequence[Record], quantity: str) -> list[float]:
    """Median over the draws of each record, without draws the value, of finite ones."""
    values = []
    for record in records:
        mean = getattr(record, quantity)
        if mean is not None:
            values.append(median(getattr(record, f"{quantity}_draws") or [mean]))
    return values


def _place(row: Row, tokens: int) -> tuple[Any, ...]:
    error = row.errors.get(tokens)
    speed = row.speed
    return (
        not row.is_exact,
        row.backend in REFERENCES,
        float("inf") if error is None else error.worst,
        -(speed.median if speed is not None else 0.0),
    )
