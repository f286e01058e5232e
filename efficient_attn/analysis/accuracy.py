"""Records of errors as curves over the size of the approximation, one panel per input."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from efficient_attn.analysis.statistics import middle
from efficient_attn.sweep.records import Record
from efficient_attn.sweep.sizes import MEAN_OF_VALUES, SEED, sized

QUANTITIES = ("output_relative_error", "output_mse", "weights_relative_error", "kernel_mse")


class ErrorPoint(NamedTuple):
    """The median error over draws at one size; low and high enclose the true median with 95 %.

    Attributes:
        size: Features, rank or window; None where the backend has no size.
    """

    size: int | None
    value: float
    low: float
    high: float
    record: Record


class ErrorCurve(NamedTuple):
    """One backend with its options, in rising order of size; `random` if its features are drawn."""

    label: str
    backend: str
    random: bool
    points: tuple[ErrorPoint, ...]

    def at(self, size: int) -> ErrorPoint | None:
        """The point of this size, or of the odd size that stands for it."""
        return next((point for point in self.points if point.size in (size, size + 1)), None)


class Panel(NamedTuple):
    """Everything measured on one input.

    Attributes:
        inputs: Where q, k, v come from, such as `gaussian(norm=0.5)`.
        failed: Records without a number, each with its reason.
        yardstick: The error of the mean of the values.
    """

    inputs: str
    tokens: int
    num_heads: int
    head_dim: int
    curves: tuple[ErrorCurve, ...]
    failed: tuple[Record, ...]
    yardstick: float | None

    @property
    def source(self) -> str:
        """`gaussian`, `encoder`, or the name of a file."""
        return self.inputs.partition("(")[0]


def quantity_in(records: Sequence[Record], wanted: str) -> str:
    """The wanted error, or what was measured in its place where a run asked for weights alone."""
    measured = [name for name in QUANTITIES if any(getattr(record, name) is not None for record in records)]
    return wanted if wanted in measured or not measured else measured[0]


def panels(records: Iterable[Record], quantity: str) -> tuple[Panel, ...]:
    """One panel per input, in the order of the records; of equal cases the last counts."""
    latest = {record.case.key: record for record in records if record.case.kind == "error"}
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in latest.values():
        case = record.case
        groups.setdefault((case.inputs, case.tokens, case.num_heads, case.head_dim, case.seed), []).append(
            record
        )
    return tuple(_panel(group, quantity) for group in groups.values())


def below_from(curve: ErrorCurve, yardstick: float) -> int | None:
    """The smallest size from which on every measured one is below the yardstick."""
    found = None
    for point in reversed(curve.points):
        if point.size is None or point.value >= yardstick:
            break
        found = point.size
    return found


def _panel(records: Sequence[Record], quantity: str) -> Panel:
    case = records[0].case
    measured = [record for record in records if getattr(record, quantity) is not None]
    yardsticks = [getattr(record, quantity) for record in measured if record.case.backend == MEAN_OF_VALUES]
    series: dict[str, list[Record]] = {}
    for record in measured:
        if record.case.backend != MEAN_OF_VALUES:
            series.setdefault(sized(record.case).series, []).append(record)
    return Panel(
        inputs=case.inputs,
        tokens=case.tokens,
        num_heads=case.num_heads,
        head_dim=case.head_dim,
        curves=tuple(_curve(label, group, quantity) for label, group in series.items()),
        failed=tuple(record for record in records if record.status != "ok"),
        yardstick=yardsticks[-1] if yardsticks else None,
    )


def _curve(label: str, records: Sequence[Record], quantity: str) -> ErrorCurve:
    points = sorted((_point(record, quantity) for record in records), key=lambda point: point.size or 0)
    case = records[0].case
    return ErrorCurve(label, case.backend, SEED in case.options, tuple(points))


def _point(record: Record, quantity: str) -> ErrorPoint:
    # A draw that is not finite is kept as null in the file.
    draws = [value for value in getattr(record, f"{quantity}_draws") or () if value is not None]
    found = middle(draws or [getattr(record, quantity)])
    return ErrorPoint(sized(record.case).size, found.median, found.low, found.high, record)
