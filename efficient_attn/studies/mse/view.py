"""Errors over the size of the approximation: curves of records, as tables, in sentences and as plots."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import UNIFORM_ATTENTION, sized
from efficient_attn.report import text
from efficient_attn.report.figures import UNIFORM_STYLE, Axis, Chart, Plot, Series, in_rows, line_styles
from efficient_attn.report.table import PREDICTED, Table
from efficient_attn.report.text import show_error
from efficient_attn.runs.store import over_budget
from efficient_attn.stats.estimates import FEWEST_FOR_95, grouped, middle, operations_share

RELATIVE, KERNEL = "output_relative_error", "kernel_mse"
NAMES = {
    RELATIVE: "Relative output error",
    "output_mse": "Mean squared output error",
    KERNEL: "Mean squared error of one kernel entry over its square",
}

# A 95 % interval of a mean, in standard errors; further from theory than `_SURE` is no chance.
WIDE, _SURE = 1.96, 4.0
# Squared errors of kernel entries that are exact are rounding below this.
_EXACT = 1e-20
# Errors below this share of the baseline are rounding. From this many times the baseline on errors are off
# the scale.
_ROUNDING, _WORST = 1e-4, 12.0


class ErrorPoint(NamedTuple):
    """Error at one size.

    Attributes:
        size: Features, rank or window; None for a backend without a size.
        value: Median over draws; of a kernel entry the mean, or the theoretical error without draws.
        low, high: 95 % interval of the value.
        samples: Number of draws.
        expected: Theoretical error of a kernel entry; None without a closed form.
    """

    size: int | None
    value: float
    low: float
    high: float
    samples: int
    record: Record
    expected: float | None = None


Curve = Sequence[ErrorPoint]


class Panel(NamedTuple):
    """All measurements on one input.

    Attributes:
        inputs: Name of the inputs, such as `gaussian(norm=0.5)`.
        title: `gaussian, norm 0.5; 4096 tokens, 1 head of 16`.
        curves: Points by label, in rising order of size.
        failed: Records without a value, each with its reason.
        yardstick: Error of uniform attention.
    """

    inputs: str
    title: str
    curves: dict[str, list[ErrorPoint]]
    failed: tuple[Record, ...]
    yardstick: float | None

    @property
    def points(self) -> list[ErrorPoint]:
        return [point for points in self.curves.values() for point in points]


def quantity_in(records: Sequence[Record]) -> str:
    """The error that a run measured: of kernel entries, or relative, or the mean squared one alone."""
    if any(record.case.of == "kernel" for record in records):
        return KERNEL
    return RELATIVE if any(record.output_relative_error is not None for record in records) else "output_mse"


def panels(records: Iterable[Record], quantity: str) -> list[Panel]:
    """One panel per input, in the order of the records."""
    measured = (record for record in records if record.case.kind == "error")
    groups = grouped(measured, "inputs", "tokens", "num_heads", "head_dim")
    return [_panel(group, quantity) for group in groups]


def _panel(records: Sequence[Record], quantity: str) -> Panel:
    case = records[0].case
    curves: dict[str, list[ErrorPoint]] = {}
    for record in records:
        if _has_value(record, quantity):
            curves.setdefault(sized(record.case).series, []).append(_point(record, quantity))
    for curve in curves.values():
        curve.sort(key=lambda point: point.size or 0)
    plainest = curves.pop(UNIFORM_ATTENTION, None)
    missing = [record for record in records if record.status != "ok" and not _has_value(record, quantity)]
    # What a backend does not support is said once for all sizes.
    failed = {(r.case.backend, r.reason) if r.status == "unsupported" else r.case.key: r for r in missing}
    heads = "1 head" if case.num_heads == 1 else f"{case.num_heads} heads"
    return Panel(
        inputs=case.inputs,
        title=f"{text.describe(case.inputs)}; {case.tokens} tokens, {heads} of {case.head_dim}",
        curves=curves,
        failed=tuple(failed.values()),
        yardstick=plainest[0].value if plainest else None,
    )


def _has_value(record: Record, quantity: str) -> bool:
    if quantity != KERNEL:
        return getattr(record, quantity) is not None
    measured = record.kernel_mse is not None or record.expected_kernel_mse is not None
    return bool(record.kernel_value) and sized(record.case).size is not None and measured


def _point(record: Record, quantity: str) -> ErrorPoint:
    size = sized(record.case).size
    draws = [draw for draw in getattr(record, f"{quantity}_draws") or () if draw is not None]
    if quantity != KERNEL:
        # A non-finite draw is null in the file.
        return ErrorPoint(size, *middle(draws or [getattr(record, quantity)]), record)
    square, expected = (record.kernel_value or math.nan) ** 2, record.expected_kernel_mse
    expected = None if expected is None else expected / square
    if not draws:
        value = math.nan if expected is None else expected
        return ErrorPoint(size, value, value, value, 0, record, expected)
    mean, count = fmean(draws) / square, len(draws)
    wide = WIDE * stdev(draws) / square / math.sqrt(count) if count > 1 else 0.0
    return ErrorPoint(size, mean, mean - wide, mean + wide, count, record, expected)


def interval(points: Curve) -> str:
    """Words for draws and their interval, empty if every error was measured once."""
    most = max(points, key=lambda point: point.samples, default=None)
    if most is None or most.samples < 2:
        return ""
    if most.record.case.of == "kernel":
        return f"mean of {most.samples} draws and its 95 % interval"
    edges = "95 % interval" if most.samples >= FEWEST_FOR_95 else "range"
    return f"median of {most.samples} draws and its {edges}"


def tables(records: Sequence[Record]) -> list[Table]:
    """Errors by size, one table per input that the budget reached."""
    quantity = quantity_in(records)
    shown = panels(records, quantity)
    return [_table(x, quantity) for x in shown if x.curves or not all(map(over_budget, x.failed))]


def _table(panel: Panel, quantity: str) -> Table:
    sizes = _even({point.size for point in panel.points if point.size is not None})
    odd = {label for label, curve in panel.curves.items() for x in curve if (x.size or 0) - 1 in sizes}
    columns: list[int | None] = [*([] if quantity == KERNEL else [None]), *sizes]
    rows = [(label, *(_cell(curve, size) for size in columns)) for label, curve in panel.curves.items()]
    if panel.yardstick is not None:
        rows.insert(0, (UNIFORM_ATTENTION, text.three_digits(panel.yardstick), *[""] * len(sizes)))
    meaning = interval(panel.points)
    # Draws that are too few leave theory, or nothing without a closed form.
    silent = [record for record in panel.failed if record.kernel_value]
    few = [*silent, *(point.record for point in panel.points if not point.samples)]
    remark = next((f"; {record.reason.partition(':')[0]}" for record in few if record.reason), "")
    names = ", ".join(dict.fromkeys(sized(record.case).series for record in silent))
    notes = (
        *([f"{meaning[0].upper()}{meaning[1:]}."] if meaning else []),
        *(["×: measured over theory."] if quantity == KERNEL else []),
        *([f"{', '.join(sorted(odd))} = size + 1."] if odd else []),
        *text.mark_notes(rows, words=f"theory{remark}"),
        *([f"{names}: no theory{remark}."] if names else []),
        *text.failure_notes(record for record in panel.failed if not record.kernel_value),
    )
    heads = ("backend", *("fixed" if size is None else str(size) for size in columns))
    return Table(f"{NAMES[quantity]}: {panel.title}", heads, tuple(rows), notes).compared(errors=heads[1:])


def _even(sizes: Collection[int]) -> list[int]:
    """Sizes, without an odd one that stands for the even size before it."""
    return sorted(size for size in sizes if size - 1 not in sizes)


def _cell(curve: Curve, size: int | None) -> str:
    """The value, its ratio to theory, and a wide interval."""
    sizes = (None,) if size is None else (size, size + 1)
    point = next((point for point in curve if point.size in sizes), None)
    if point is None:
        return ""
    if not point.samples:
        return f"{PREDICTED}{show_error(point.value)}"
    value, tab, words = text.show_spread(*point[1:4], unit=1.0).partition("\t")
    return f"{value}{f' ×{point.value / point.expected:.2f}' if point.expected else ''}{tab}{words}"


def sentences(records: Sequence[Record]) -> list[str]:
    """Useful backends or agreement with theory, then points beyond the budget."""
    quantity = quantity_in(records)
    shown = panels(records, quantity)
    if quantity == KERNEL:
        texts = _agreement([point for panel in shown for point in panel.points])
    else:
        texts = _useful([panel for panel in shown if not panel.inputs.startswith("gaussian")] or shown)
    points = Counter(text.describe(record.case.inputs) for record in records)
    skipped = Counter(text.describe(record.case.inputs) for record in records if over_budget(record))
    if skipped:
        places = "; ".join(f"{name} ({count} of {points[name]})" for name, count in skipped.items())
        texts.append(f"{text.skipped_note(skipped.total())} Skipped: {places}.")
    return texts


def _useful(shown: Sequence[Panel]) -> list[str]:
    """What is below uniform attention on every input, and from which size on."""
    if not shown or any(panel.yardstick is None for panel in shown):
        return []
    texts = []
    for label in dict.fromkeys(label for panel in shown for label in panel.curves):
        curves = [panel.curves.get(label, []) for panel in shown]
        sizes = [below_from(x, panel.yardstick or 0.0) for x, panel in zip(curves, shown, strict=True)]
        if None not in sizes:
            counted = all(operations_share(x.record) is not None for curve in curves for x in curve)
            remark = "" if counted else " (operations not counted)"
            texts.append(f"{label} from size {max(size for size in sizes if size is not None)}{remark}")
    names = ", ".join(texts) or "nothing measured here"
    return [f"Below uniform attention on every input, with fewer operations than exact: {names}."]


def below_from(curve: Curve, yardstick: float) -> int | None:
    """The smallest size from which on errors are below the baseline, among sizes that save operations."""
    size = None
    for point in reversed([point for point in curve if (operations_share(point.record) or 0) < 1]):
        if point.size is None or point.value >= yardstick:
            break
        size = point.size
    return size


def _agreement(points: Curve) -> list[str]:
    """Number of errors of kernel entries that agree with theory."""
    ratios, close = [], 0
    for _, value, low, high, _, _, expected in points:
        if high > low and expected and expected > _EXACT:
            ratios.append(value / expected)
            close += abs(value - expected) <= _SURE / WIDE * (high - value)
    if not ratios:
        return []
    return [
        f"Measured errors of a kernel entry are within {_SURE:.0f} standard errors of theory at {close} of "
        f"{len(ratios)} points (measured over theory {min(ratios):.2f} to {max(ratios):.2f})."
    ]


def plots(records: Sequence[Record]) -> dict[str, Plot]:
    """The error of every backend against its size, a chart for each input."""
    quantity = quantity_in(records)
    shown = [panel for panel in panels(records, quantity) if panel.curves]
    if not shown:
        return {}
    points = [point for panel in shown for point in panel.points]
    backends = {label: x[0].record.case.backend for panel in shown for label, x in panel.curves.items()}
    styles, meaning = line_styles(list(backends.items())), interval(points)
    if quantity == KERNEL:
        limits, name = None, quantity
        conditions = f"lines: theory; points: {meaning or 'one draw'}, where draws suffice"
    else:
        limits, name = _limits(points, [panel.yardstick for panel in shown if panel.yardstick]), "error"
        bands = f"; lines and bands: {meaning}" if meaning else ""
        conditions = f"reference in float64{bands}; errors below {_ROUNDING:g} of uniform attention not drawn"
    charts = [_chart(panel, styles, limits, quantity) for panel in shown]
    return {name: Plot(NAMES[quantity], conditions, in_rows(charts, 1 if len(shown) == 1 else 2))}


def _limits(points: Curve, yardsticks: list[float]) -> tuple[float, float]:
    """From below the smallest error that is no rounding to above the largest that is no nonsense."""
    floor, worst = _ROUNDING * min(yardsticks, default=1.0), _WORST * max(yardsticks, default=1.0)
    edges = [edge for point in points for edge in (point.value, point.low) if floor < edge <= worst]
    return min(edges + yardsticks, default=1.0) / 1.4, max(edges + yardsticks, default=1.0) * 1.8


def _chart(
    panel: Panel, styles: Mapping[str, Any], limits: tuple[float, float] | None, quantity: str
) -> Chart:
    low, high = limits or (0.0, math.inf)
    series, notes = list[Series](), []
    if panel.yardstick is not None:
        series.append(Series(UNIFORM_ATTENTION, (), (panel.yardstick,), UNIFORM_STYLE))
    for label, curve in panel.curves.items():
        values = [point.value for point in curve]
        if min(values) > high:
            ends = dict.fromkeys((show_error(min(values)), show_error(max(values))))
            notes.append(f"{label} off scale ({'–'.join(ends)})")
        elif max(values) >= low:
            series += _series(label, curve, styles[label])
    sizes = _even({point.size for point in panel.points if point.size is not None})
    x = Axis("features, rank or window", "log2", "{:.0f}".format, sizes)
    y = Axis(NAMES[quantity].lower(), "log", show_error, limits=limits)
    return Chart(x, y, tuple(series), panel.title, tuple(notes))


def _series(label: str, curve: Curve, style: Mapping[str, Any]) -> list[Series]:
    """A line with its band, or points with bars and the line of theory for kernel entries."""
    points = [point for point in curve if point.size is not None]
    if not points:
        return [Series(label, (), (curve[0].value,), {**style, "marker": ""})]
    measured = [point for point in points if point.samples]
    x, y = ([getattr(point, name) for point in measured] for name in ("size", "value"))
    low, high = text.edges(point[1:4] for point in measured)
    shown = {**style, "markersize": 4, "linewidth": 1.5}
    if points[0].record.case.of != "kernel":
        return [Series(label, x, y, shown, low, high)]
    theory = Series(
        "" if measured else label,
        [point.size for point in points if point.size],
        [point.expected for point in points],
        {**style, "marker": "", "linewidth": 1.3},
        hints=["theory"] * len(points),
    )
    return [theory, Series(label, x, y, {**shown, "linestyle": "none"}, low, high, bars=True)]
