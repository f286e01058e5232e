"""Error, time and memory of backends on the same inputs: Pareto front and verdict."""

from typing import NamedTuple

from efficient_attn.runner.records import Case, Record
from efficient_attn.runner.sizes import MEAN_OF_VALUES
from efficient_attn.stats.curves import YARDSTICK
from efficient_attn.stats.median import Middle
from efficient_attn.stats.rounds import Typical, time_ratio

# Relative errors below this, or below twice the error of exact attention in the same dtype, are rounding
# and count as equal.
ROUNDING = 1e-4


class Contender(NamedTuple):
    """Measurements of one backend or baseline; None: not measured.

    Attributes:
        error: Relative output error, median over draws; for several layers their median and range.
        layers: Number of layers in the error.
        time_s: Time of one call.
        timed: The record of its times.
        drawn: Whether its features are random.
        failed: Reason for missing values.
    """

    label: str
    backend: str
    error: Middle | None
    time_s: Typical | None
    peak_bytes: int | None
    drawn: bool
    calibrated_on: str | None
    failed: tuple[Record, ...]
    timed: Record | None = None
    layers: int = 1

    @property
    def worst(self) -> float:
        """Error on the layer where it is largest."""
        if self.error is None:
            return float("inf")
        return self.error.high if self.layers > 1 else self.error.median

    @property
    def is_yardstick(self) -> bool:
        """Whether it is a baseline rather than a backend."""
        return self.backend == MEAN_OF_VALUES

    def speed(self, other: "Contender | None") -> Typical | None:
        """Speed-up over another contender; None if either was not timed."""
        if self.timed is None or other is None or other.timed is None:
            return None
        return time_ratio(self.timed, other.timed)

    def cost(self, quantity: str) -> float | None:
        """The median time, or the peak memory."""
        if quantity == "time_s":
            return None if self.time_s is None else self.time_s.median
        return self.peak_bytes


class Verdict(NamedTuple):
    """Whether a contender is both nearly exact and faster.

    Attributes:
        both: Nearly exact on every layer, and faster by an interval below the time of exact attention; the
            fastest first.
        alike: Nearly exact, with a time interval that overlaps exact attention's.
        near: All nearly exact contenders except exact attention, by time.
        fast: The faster contender with the smallest error.
        partly: Faster, and nearly exact on some layers only.
    """

    both: tuple[Contender, ...]
    alike: tuple[Contender, ...]
    near: tuple[Contender, ...]
    fast: Contender | None
    partly: tuple[Contender, ...]

    @property
    def accurate(self) -> Contender | None:
        """The fastest nearly exact contender."""
        return self.near[0] if self.near else None


class Comparison(NamedTuple):
    """All measurements on one input at one length.

    Attributes:
        case: The case of one of the times.
        contenders: By time, the fastest first; untimed ones last.
        records: The records of the comparison.
    """

    case: Case
    contenders: tuple[Contender, ...]
    records: tuple[Record, ...]

    @property
    def exact(self) -> Contender | None:
        """Exact attention through the fused kernel, if both its error and its time were measured."""
        found = [one for one in self.contenders if one.backend == YARDSTICK and one.error and one.time_s]
        return min(found, key=lambda one: len(one.label), default=None)

    @property
    def nearest(self) -> Contender | None:
        """The backend with the smallest error, except `exact`."""
        found = [
            one for one in self.contenders if one.error and not one.is_yardstick and one is not self.exact
        ]
        return min(found, key=_error, default=None)

    @property
    def finished(self) -> set[str]:
        """Labels whose error and time were both measured, or failed."""
        kinds = {
            kind: {record.case.label for record in self.records if record.case.kind == kind}
            for kind in ("error", "time")
        }
        return kinds["error"] & kinds["time"] | {one.label for one in self.contenders if one.failed}

    @property
    def rounding(self) -> float:
        """Largest error that is rounding of the dtype."""
        return max(ROUNDING, 2 * self.exact.worst if self.exact else 0.0)

    def front(self, quantity: str) -> tuple[Contender, ...]:
        """Pareto front of error and this cost, from the cheapest on."""
        front: list[Contender] = []
        least = float("inf")
        for cost, error, one in sorted(self._points(quantity), key=lambda point: point[:2]):
            if error < least:
                front.append(one)
                least = error
            # Equal cost and error: neither dominates the other.
            elif front and error == least and cost == front[-1].cost(quantity):
                front.append(one)
        return tuple(front)

    def verdict(self, max_error: float) -> Verdict:
        """The contenders within `max_error` of exact attention and faster; requires exact attention."""
        exact = self.exact
        assert exact is not None and exact.time_s is not None
        known = [one for one in self.contenders if one.error and one.time_s and not one.is_yardstick]
        others = [one for one in known if one is not exact]
        near = tuple(one for one in others if one.worst <= max_error)
        sides = {one.label: speed.side_of_one for one in others if (speed := one.speed(exact)) is not None}
        faster = [one for one in others if sides[one.label] == 1]
        slower = [one for one in others if sides[one.label] == -1]
        both = tuple(one for one in near if one in faster)
        alike = tuple(one for one in near if one not in faster and one not in slower)
        partly = tuple(
            one
            for one in faster
            if one not in near and one.layers > 1 and one.error and one.error.low <= max_error
        )
        return Verdict(both, alike, near, min(faster, key=_error, default=None), partly)

    def _points(self, quantity: str) -> list[tuple[float, float, Contender]]:
        """Cost and error of contenders that have both; rounding errors count as equal."""
        return [
            (cost, 0.0 if one.error.median <= self.rounding else one.error.median, one)
            for one in self.contenders
            if one.error is not None and (cost := one.cost(quantity)) is not None
        ]


def _error(one: Contender) -> float:
    return one.error.median if one.error is not None else float("inf")
