"""Predicted time of a call of any size from a few short calls.

A call has a fixed part, a part per token that all heads share (steps of a loop over chunks), and one part per
kind of counted operation, each at a constant rate of this machine:

    t = a + b · tokens + c · products + d · exponentials + e · bytes,   a, b, c, d, e ≥ 0

Rates are fitted per backend to measured calls, by least squares of relative residuals. Counts hold the
dependence on length, heads, head dimension and batch; dtype, device, threads and causality of a prediction
are as measured, since each selects other kernels.

Each measured call is predicted from all calls but itself; the scatter of these predictions, times Student's
quantile, is the half-width of the logarithm. Beyond the longest measured call this is an extrapolation;
docs/advise.md has the coverage of the intervals, 88 to 98 % of measured times.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from efficient_attn.measure.record import Case, Record, replace
from efficient_attn.stats.estimates import OUTSIDE, WIDEST, Floats, Typical, call_time, grouped, quantile

# Calls from which rates and their scatter are fitted.
FEWEST_CALLS = 3


class Predicted(NamedTuple):
    """Prediction with a nominal 95 % interval, or None beyond all lengths."""

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class TimeModel:
    """Time of a backend at any size.

    Attributes:
        case: One of the measured cases; predictions share its options, dtype, device, threads and causality.
        target: Backend, as any argument of `build`.
        rates: Seconds per call, token, operation of a matrix product, exponential and byte.
        scatter: Root mean square of ln(predicted / measured) of calls that the fit did not use.
        calls: Number of measured calls.
    """

    case: Case
    target: Any
    rates: tuple[float, ...]
    scatter: float
    calls: int

    def time_s(self, **sizes: int) -> Predicted:
        """Predicted time of a call. `sizes` are fields of a case, such as tokens=4096, num_heads=16."""
        value, factor = self._value(sizes), _factor(self.scatter, self.calls)
        return Predicted(value, value / factor, value * factor)

    def speed(self, exact: "TimeModel", **sizes: int) -> Predicted:
        """Predicted speed-up over exact attention. Above 1 this backend is faster."""
        ratio = exact._value(sizes) / self._value(sizes)
        factor = _factor(math.hypot(self.scatter, exact.scatter), min(self.calls, exact.calls))
        return Predicted(ratio, ratio / factor, ratio * factor)

    def _value(self, sizes: Mapping[str, int]) -> float:
        return float(np.dot(self.rates, _counts(replace(self.case, label="", **sizes), self.target)))


def time_models(records: Iterable[Record], targets: Mapping[str, Any] | None = None) -> dict[str, TimeModel]:
    """Models of all backends with enough measured calls, by label.

    Args:
        records: Times of attention alone, of one dtype, device, number of threads and causality.
        targets: Backends by label, if the name in the records is not sufficient.
    """
    timed = (r for r in records if r.case.kind == "time" and r.status == "ok" and r.times_s)
    groups = {group[0].case.label: group for group in grouped(timed, "label")}
    models = {}
    for label, group in groups.items():
        case, target = group[0].case, (targets or {}).get(label, group[0].case.backend)
        if len(group) >= FEWEST_CALLS:
            counts = [_counts(replace(record.case, label=""), target) for record in group]
            rates, scatter = _fit(counts, [call_time(record).median for record in group])
            models[label] = TimeModel(case, target, tuple(rates), scatter, len(group))
    return models


def extrapolated(times_s: Mapping[int, float], tokens: int) -> tuple[float, float, float] | None:
    """Time at a length with its interval, from t = a + b · tokens + c · tokens² with a, b, c ≥ 0.

    A length with a time has that time; fewer than FEWEST_CALLS times predict nothing.
    """
    if tokens in times_s:
        return (times_s[tokens],) * 3
    if len(times_s) < FEWEST_CALLS:
        return None
    rates, scatter = _fit([(1.0, n, n**2) for n in times_s], [*times_s.values()])
    value, factor = float(np.dot(rates, (1.0, tokens, tokens**2))), _factor(scatter, len(times_s))
    return value, value / factor, value * factor


def _fit(counts: Sequence[Sequence[float]], times_s: Sequence[float]) -> tuple[Floats, float]:
    """Rates, and the scatter of each time around its prediction from the others."""
    # Shares of a call: every row sums to one where the prediction equals the measurement.
    shares = np.array(counts) / np.array(times_s)[:, None]
    missed = [math.log(shares[n] @ _rates(np.delete(shares, n, axis=0))) for n in range(len(times_s))]
    return _rates(shares), math.sqrt(float(np.mean(np.square(missed))))


def _rates(shares: Floats) -> Floats:
    """Non-negative rates by least squares over all subsets of the parts."""
    units = np.abs(shares).max(axis=0)
    scaled = shares / np.where(units > 0, units, 1.0)
    best, least = np.zeros(scaled.shape[1]), math.inf
    parts = range(scaled.shape[1])
    for chosen in itertools.chain.from_iterable(itertools.combinations(parts, n + 1) for n in parts):
        rates = np.linalg.lstsq(scaled[:, chosen], np.ones(len(scaled)), rcond=None)[0]
        missed = float(np.square(scaled[:, chosen] @ rates - 1).sum())
        # A further part must reduce the residual.
        if (rates >= 0).all() and missed < least - 1e-12:
            best, least = np.zeros(scaled.shape[1]), missed
            best[list(chosen)] = rates
    return best / np.where(units > 0, units, 1.0)


@cache
def _counts(case: Case, target: Any) -> tuple[float, ...]:
    """A call, its tokens, operations of matrix products, exponentials and bytes."""
    # Reports are drawn without torch.
    from efficient_attn.measure.calls import attention_cost

    cost = attention_cost(case, target)
    moved = cost.moved_bytes + cost.kept_bytes
    return 1.0, float(case.tokens), float(cost.flops), float(cost.exponentials), float(moved)


def crossover(speeds: Mapping[int, Typical | Predicted]) -> Predicted:
    """Length above which a backend is faster, interpolated between measured lengths in logarithms.

    It is faster at all longer lengths. Interval ends follow from the intervals. None: beyond all lengths.

    Args:
        speeds: Measured or predicted speed-ups over exact attention, with intervals, by length.
    """
    lengths = sorted(speeds)
    values, lows, highs = np.log(np.array([speeds[tokens][:3] for tokens in lengths], float)).T
    rises = (_last_rise(np.log(lengths), logs) for logs in (values, highs, lows))
    return Predicted(*(None if rise is None else round(math.exp(rise), 6) for rise in rises))


def _last_rise(places: Floats, values: Floats) -> float | None:
    """Place from which all values are positive, interpolated linearly, or None if the last is not."""
    behind = np.flatnonzero(values <= 0)
    if not len(behind):
        return float(places[0])
    start = int(behind[-1])
    if start == len(values) - 1:
        return None
    here, there = values[start], values[start + 1]
    return float(places[start] + (places[start + 1] - places[start]) * (here / (here - there)))


def _factor(scatter: float, calls: int) -> float:
    return math.exp(min(quantile(OUTSIDE, max(calls - 1, 1)) * scatter, WIDEST))
