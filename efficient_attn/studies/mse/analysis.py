"""Error records as curves over the size of the approximation, one panel per input."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import UNIFORM_ATTENTION, sized
from efficient_attn.report.text import describe
from efficient_attn.stats.candidates import operations_share
from efficient_attn.stats.estimates import FEWEST_FOR_95, grouped, middle

RELATIVE = "output_relative_error"
NAMES = {RELATIVE: "Relative output error", "output_mse": "Mean squared output error"}


class ErrorPoint(NamedTuple):
    """Median error at one size.

    Attributes:
        size: Features, rank or window; None for a backend without a size.
        value: Median over seeds of the inputs of the medians over draws.
        low, high: 95 % interval of the median over input seeds; over draws for a single seed.
        record: The first of its records.
        samples: Number of samples behind the interval: seeds of the inputs if there are several, else draws.
        over_inputs: Whether the samples are seeds of the inputs.
    """

    size: int | None
    value: float
    low: float
    high: float
    record: Record
    samples: int
    over_inputs: bool


class ErrorCurve(NamedTuple):
    """One backend with its options, in rising order of size."""

    label: str
    backend: str
    points: tuple[ErrorPoint, ...]

    def at(self, size: int) -> ErrorPoint | None:
        """The point of this size, or of the odd size that replaces it."""
        return next((point for point in self.points if point.size in (size, size + 1)), None)


class Panel(NamedTuple):
    """All measurements on one input.

    Attributes:
        inputs: Name of the inputs, such as `gaussian(norm=0.5)`.
        failed: Records without a value, each with its reason.
        yardstick: Error of uniform attention.
    """

    inputs: str
    tokens: int
    num_heads: int
    head_dim: int
    curves: tuple[ErrorCurve, ...]
    failed: tuple[Record, ...]
    yardstick: float | None

    @property
    def title(self) -> str:
        """`gaussian, norm 0.5; 4096 tokens, 1 head of 16`."""
        heads = "1 head" if self.num_heads == 1 else f"{self.num_heads} heads"
        return f"{describe(self.inputs)}; {self.tokens} tokens, {heads} of {self.head_dim}"

    def curve(self, label: str) -> ErrorCurve | None:
        return next((curve for curve in self.curves if curve.label == label), None)

    @property
    def source(self) -> str:
        """`gaussian`, `encoder`, or the name of a file."""
        return self.inputs.partition("(")[0]


def quantity_in(records: Sequence[Record], quantity: str = RELATIVE) -> str:
    """The wanted error, or the mean squared one if a run measured that alone."""
    return quantity if any(getattr(record, quantity) is not None for record in records) else "output_mse"


def panels(records: Iterable[Record], quantity: str) -> tuple[Panel, ...]:
    """One panel per input, in the order of the records; the last of equal cases counts."""
    measured = (record for record in records if record.case.kind == "error")
    groups = grouped(measured, "inputs", "tokens", "num_heads", "head_dim")
    return tuple(_panel(group, quantity) for group in groups)


def interval(points: Sequence[ErrorPoint]) -> str:
    """`median of 6 draws and its 95 % interval, …`; empty if every error was measured once."""
    samples, over_inputs = max(((point.samples, point.over_inputs) for point in points), default=(1, False))
    if samples == 1:
        return ""
    edges = "95 % interval" if samples >= FEWEST_FOR_95 else "range"
    if over_inputs:
        return f"median of {samples} seeds of the inputs and its {edges}"
    return f"median of {samples} draws and its {edges} over these draws"


def below_from(curve: ErrorCurve, yardstick: float) -> int | None:
    """The smallest size from which on errors are below the baseline, among sizes that save operations."""
    size = None
    for point in reversed([point for point in curve.points if (operations_share(point.record) or 0) < 1]):
        if point.size is None or point.value >= yardstick:
            break
        size = point.size
    return size


def _panel(records: Sequence[Record], quantity: str) -> Panel:
    case = records[0].case
    measured = [record for record in records if getattr(record, quantity) is not None]
    series: dict[str, list[Record]] = {}
    for record in measured:
        series.setdefault(sized(record.case).series, []).append(record)
    curves = [_curve(label, group, quantity) for label, group in series.items()]
    plainest = next((curve for curve in curves if curve.backend == UNIFORM_ATTENTION), None)
    return Panel(
        inputs=case.inputs,
        tokens=case.tokens,
        num_heads=case.num_heads,
        head_dim=case.head_dim,
        curves=tuple(curve for curve in curves if curve is not plainest),
        failed=tuple(record for record in records if record.status != "ok"),
        yardstick=plainest.points[0].value if plainest else None,
    )


def _curve(label: str, records: Sequence[Record], quantity: str) -> ErrorCurve:
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        # Records that differ only by the seed of their inputs form one point.
        options = tuple(sorted(record.case.options.items(), key=str))
        groups.setdefault((sized(record.case), options), []).append(record)
    points = sorted((_point(group, quantity) for group in groups.values()), key=lambda point: point.size or 0)
    case = records[0].case
    return ErrorCurve(label, case.backend, tuple(points))


def _point(records: Sequence[Record], quantity: str) -> ErrorPoint:
    """One size, from one record per input seed."""
    over_draws = [middle(_draws(record, quantity)) for record in records]
    several = len(records) > 1
    estimate = middle([value.median for value in over_draws]) if several else over_draws[0]
    return ErrorPoint(
        size=sized(records[0].case).size,
        value=estimate.median,
        low=estimate.low,
        high=estimate.high,
        record=records[0],
        samples=estimate.samples,
        over_inputs=several,
    )


def _draws(record: Record, quantity: str) -> list[float]:
    # A non-finite draw is null in the file.
    draws = [value for value in getattr(record, f"{quantity}_draws", None) or () if value is not None]
    return draws or [getattr(record, quantity)]
