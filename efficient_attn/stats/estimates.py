"""Medians, times and ratios of times with 95 % intervals, and curves of costs against tokens.

Calls of one round share a state of the machine, so a thousand calls may carry hardly more information than
one. Each round therefore counts once, by the median of its calls, and Student's t over rounds gives the
interval. Neighbouring rounds may be correlated, which a handful of rounds cannot show: the interval is wide
enough for a first-order autoregression with a correlation of 0.7, and conservative for independent rounds.

Rounds do not show the shift that all calls of a case share in one run, for example by its place in memory.
The rounds of one run are interleaved, so that its own speeds leave the shift out. Between two runs a shift of
3 %, one standard deviation, is added to both times of a ratio: its log half-width h becomes
√(h² + 2 (1.96 · 0.03)²).
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from statistics import NormalDist, median
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from efficient_attn.measure.record import Case, Record, replace
from efficient_attn.measure.variants import CEILING, YARDSTICK
from efficient_attn.operation_counts import softmax_matmuls, visible_pairs

Floats = NDArray[np.float64]

R = TypeVar("R", bound=Record)

# Tail probability on either side of a 95 % interval.
OUTSIDE = 0.025

# Share of the best deviation from uniform attention below which an output is bland.
_BLAND = 0.9

# Widest interval of a logarithm; beyond, the ratio leaves the range of floats.
WIDEST = 100.0

# Degrees of freedom above which Student's t is treated as normal.
_NORMAL = 1e3

_NODES = np.polynomial.legendre.leggauss(128)

# Three rounds would need six standard deviations on either side, four need four.
FEWEST_ROUNDS = 4

# Assumed correlation of neighbouring rounds.
CORRELATION = 0.7

# Assumed standard deviation of the shift of a case from run to run, relative to its time.
RUN_SHIFT = 0.03

# Half-width of the 95 % interval of the logarithm of a ratio from the shifts of two runs alone.
SHIFT_HALF_WIDTH = math.sqrt(2) * RUN_SHIFT * NormalDist().inv_cdf(1 - OUTSIDE)

# Bounds on plausible times, beyond which products leave the range of floats.
_SHORTEST_S, _LONGEST_S = 1e-90, 1e90

# Five samples all lie on one side of the median with probability 1/16, more than 5 %.
FEWEST_FOR_95 = 6

# Kind of record that holds each quantity.
_KINDS = {"time_s": "time", "peak_bytes": "memory"}

# Names of times in tables, of device times too; the CPU has one time.
TIME, DEVICE_TIME = "time", "device time"

# Fields that may differ between the cases of several runs, and then become part of the curve's name.
MAY_DIFFER = (
    *("of", "layers", "batch", "num_heads", "num_kv_heads", "head_dim", "causal", "backward"),
    *("dtype", "device", "threads", "inputs", "seed", "l2"),
)

Namer = Callable[[Case], str]

# What is known of a ratio. Within 10 % of 1 both are the same.
FASTER, SLOWER, SAME, OPEN = "faster", "slower", "as fast", "not decided"
_SAME = 1.1


class Typical(NamedTuple):
    """Median over rounds with a 95 % interval, if there are enough.

    Attributes:
        samples: Number of calls, or of rounds where rounds are the samples.
    """

    median: float
    low: float | None
    high: float | None
    samples: int

    @property
    def side_of_one(self) -> int:
        """1 for an interval above 1, −1 below, else 0."""
        if self.low is None or self.high is None:
            return 0
        return int(self.low > 1) - int(self.high < 1)

    @property
    def outcome(self) -> str:
        """FASTER or SLOWER, SAME for an interval within 10 % of 1, else OPEN."""
        if self.side_of_one:
            return FASTER if self.side_of_one > 0 else SLOWER
        low, high = self.low or 0.0, self.high or math.inf
        return SAME if low >= 1 / _SAME and high <= _SAME else OPEN


def middle(samples: Sequence[float]) -> tuple[float, float, float, int]:
    """Median, the closest order statistics with 95 % confidence, and the number of samples.

    The number of samples below the true median is binomial(samples, ½) for any distribution. Fewer than six
    samples cannot reach 95 %: the interval is then their range.
    """
    ordered = np.sort(np.asarray(samples, dtype=float))
    count = len(ordered)
    outside = max(_certainly_outside(count), 0)
    low, high = ordered[outside], ordered[count - 1 - outside]
    lower, upper = ordered[(count - 1) // 2], ordered[count // 2]
    # (lower + upper) / 2 could overflow.
    median = lower + (upper - lower) / 2
    return float(median), float(low), float(high), count


@lru_cache(maxsize=4096)
def _certainly_outside(count: int) -> int:
    """Samples outside of the 95 % interval on each side, or −1 if there are too few."""
    # P(m) / P(m − 1) = (count − m + 1) / m
    m = np.arange(1, count // 2 + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log((count - m + 1) / m))]) - count * math.log(2)
    return int(np.searchsorted(np.cumsum(np.exp(logs)), OUTSIDE, side="right")) - 1


def call_time(record: Record) -> Typical:
    """Time of a call: median over rounds of the median of each round."""
    times_s, rounds = record.times_s or (), round_times(record)
    if not len(rounds):
        return Typical(middle(times_s)[0], None, None, len(times_s))
    return _typical(rounds)._replace(samples=len(times_s))


def on_device(record: Record) -> Record:
    """Copy with `device_times_s` as `times_s`."""
    return replace(record, times_s=record.device_times_s, device_times_s=None)


def time_ratio(record: Record, baseline: Record, *, between_runs: bool = False) -> Typical:
    """Speed-up over a baseline: median ratio of times over common rounds.

    Effects on both times of a round cancel. A value above 1 means that `record` is faster. The shifts of two
    runs widen the interval.
    """
    ratios = round_ratios(record, baseline)
    if not len(ratios):
        # A file may hold times of zero.
        return Typical(call_time(baseline).median / (call_time(record).median or 1.0), None, None, 0)
    return _typical(ratios, SHIFT_HALF_WIDTH if between_runs else 0.0)


def round_ratios(record: Record, baseline: Record) -> Floats:
    """Ratio of both times in each common round, empty if rounds are unknown."""
    sides = [dict(zip(_round_numbers(side), round_times(side), strict=False)) for side in (record, baseline)]
    return np.array([sides[1][number] / sides[0][number] for number in sides[0] if number in sides[1]])


def _round_numbers(record: Record) -> Sequence[int]:
    """Number of each round; earlier records counted them from 0 without gaps."""
    numbers, count = record.round_numbers or (), len(record.round_sizes or ())
    return numbers if len(numbers) == count else range(count)


def round_times(record: Record) -> Floats:
    """Median of each round's calls, [rounds], empty if rounds are unknown."""
    times_s, sizes = record.times_s or (), record.round_sizes or ()
    if not sizes or not all(type(size) is int and size >= 0 for size in sizes) or sum(sizes) != len(times_s):
        return np.empty(0)
    times = np.array(times_s, dtype=float)
    if not ((times > _SHORTEST_S) & (times < _LONGEST_S)).all():
        return np.empty(0)
    if len(set(sizes)) == 1 and sizes[0]:
        return np.asarray(np.median(times.reshape(len(sizes), sizes[0]), axis=1))
    ends = accumulate(sizes, initial=0)
    return np.array([median(times_s[start:end]) for start, end in pairwise(ends) if end > start])


def _typical(rounds: Floats, shift: float = 0.0) -> Typical:
    """Median with an interval symmetric in the logarithm, widened by `shift`, if rounds suffice."""
    centre = median(rounds.tolist())
    if len(rounds) < FEWEST_ROUNDS:
        return Typical(centre, None, None, len(rounds))
    half = half_width(np.log(rounds), CORRELATION)
    factor = math.exp(min(math.hypot(half, shift), WIDEST))
    return Typical(centre, centre / factor, centre * factor, len(rounds))


class CurvePoint(NamedTuple):
    """Cost at a length with its interval, or None and a failed record."""

    tokens: int
    value: float | None
    low: float | None
    high: float | None
    record: Record


class Curve(NamedTuple):
    """The points of one backend in rising order of tokens."""

    label: str
    backend: str
    points: tuple[CurvePoint, ...]

    @property
    def measured(self) -> tuple[CurvePoint, ...]:
        return tuple(point for point in self.points if point.value is not None)


def curves(records: Iterable[Record], quantity: str) -> tuple[Curve, ...]:
    """Curves of `time_s` or `peak_bytes`.

    Baselines come first, then the other curves by name, independently of the order of the records. The last
    of equal cases counts.
    """
    latest = {record.case.key: record for record in records if record.case.kind == _KINDS[quantity]}
    name = namer([record.case for record in latest.values()])
    points: dict[str, list[CurvePoint]] = {}
    for record in sorted(latest.values(), key=lambda record: record.case.tokens):
        value, low, high = None, None, None
        if record.status == "ok" and quantity != "time_s":
            value = low = high = getattr(record, quantity)
        elif record.status == "ok" and record.times_s:
            value, low, high, _ = call_time(record)
        point = CurvePoint(record.case.tokens, value, low, high, record)
        points.setdefault(name(record.case), []).append(point)
    groups = (Curve(label, group[0].record.case.backend, tuple(group)) for label, group in points.items())
    return tuple(sorted(groups, key=_place))


def grouped(records: Iterable[R], *fields: str) -> list[list[R]]:
    """Group records by fields of their cases, the last of equal cases."""
    groups: dict[tuple[Any, ...], list[R]] = {}
    for record in {record.case.key: record for record in records}.values():
        groups.setdefault(tuple(getattr(record.case, name) for name in fields), []).append(record)
    return list(groups.values())


def by_clock(records: Sequence[Record]) -> dict[str, Sequence[Record]]:
    """Records by TIME, and copies with device times as times by DEVICE_TIME."""
    queued = [on_device(record) for record in records if record.device_times_s]
    return {TIME: records, DEVICE_TIME: queued} if queued else {TIME: records}


def namer(cases: Sequence[Case]) -> Namer:
    """Function that names a case by its label and the fields that differ between these cases."""
    differ = [field for field in MAY_DIFFER if len({str(getattr(case, field)) for case in cases}) > 1]
    return lambda case: ", ".join(filter(None, [case.label, *(_say(case, field) for field in differ)]))


def _say(case: Case, field: str) -> str:
    value = getattr(case, field)
    if isinstance(value, bool) or value is None:
        return field if value else ""
    return value if isinstance(value, str) else f"{field}={value}"


def _place(curve: Curve) -> tuple[bool, bool, list[tuple[int, str]]]:
    """Sort key: baselines first, numbers in names as numbers (rank=64 before rank=128)."""
    pieces = re.findall(r"\d+|\D+", curve.label)
    name = [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in pieces]
    return curve.backend != YARDSTICK, curve.backend != CEILING, name


def half_width(samples: Floats, correlation: float = 0.0, tail: float = OUTSIDE) -> float:
    """Half-width of the interval of a mean of at least two samples, with this probability on either side."""
    count = len(samples)
    lags = np.arange(1, count)
    variance = 1 + 2 * float(((1 - lags / count) * correlation**lags).sum())
    inflation = math.sqrt(variance * (count - 1) / (count - variance))
    error = float(samples.std(ddof=1)) * inflation / math.sqrt(count)
    return quantile(tail, count - 1) * error


def upper_tail(value: float, freedom: float) -> float:
    """Probability that Student's t exceeds `value`."""
    if value < 0:
        return 1 - upper_tail(-value, freedom)
    if freedom > _NORMAL:
        return math.erfc(value / math.sqrt(2)) / 2
    # With t = √f tan θ the density is proportional to cos^(f−1) θ, on a bounded interval.
    log_norm = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(math.pi) / 2
    start = math.atan(value / math.sqrt(freedom))
    nodes, weights = _NODES
    angles = start + (math.pi / 2 - start) * (nodes + 1) / 2
    heights = np.exp(log_norm + (freedom - 1) * np.log(np.cos(angles)))
    return float(heights @ weights) * (math.pi / 2 - start) / 2


@cache
def quantile(tail: float, freedom: float) -> float:
    """The value that Student's t exceeds with probability `tail`, by bisection."""
    low, high = 0.0, 1.0
    while upper_tail(high, freedom) > tail:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if upper_tail(middle, freedom) > tail else (low, middle)
    return high


def bland(record: Record) -> bool:
    """Whether an output deviates from uniform attention by less than 0.9 of its best size.

    The error is smallest at the deviation ratio ρ = c, the correlation; far below it the output is too flat.
    """
    c, ratio = record.output_correlation, record.output_deviation_ratio
    return c is not None and ratio is not None and ratio < _BLAND * c


def operations_share(record: Record) -> float | None:
    """Operations over the operations of exact attention, if counted."""
    return None if not record.flops else record.flops / exact_operations(record.case)


def exact_operations(case: Case) -> int:
    """Operations of exact attention, forward, at the sizes of the case."""
    last = case.tokens - 1
    pairs = visible_pairs(case.tokens, back=last, ahead=0 if case.causal else last)
    adds = sum(matmul.multiply_adds for matmul in softmax_matmuls(pairs, case.head_dim, case.head_dim))
    return max(2 * case.batch * case.num_heads * adds, 1)
