"""Errors as tables, in sentences and as plots, over the size of the approximation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import UNIFORM_ATTENTION
from efficient_attn.report.figures import UNIFORM_STYLE, Axis, Chart, Plot, Series, in_rows, line_styles
from efficient_attn.report.table import UNDECIDED, Table
from efficient_attn.report.text import (
    CONCATENATED,
    CONCATENATED_NOTE,
    READ_NOTE,
    edges,
    failure_notes,
    is_wide,
    mark_notes,
    rounded,
    show_error,
)
from efficient_attn.stats.candidates import operations_share
from efficient_attn.studies.mse import kernel_view
from efficient_attn.studies.mse.analysis import (
    NAMES,
    RELATIVE,
    ErrorCurve,
    ErrorPoint,
    Panel,
    below_from,
    interval,
    panels,
    quantity_in,
)
from efficient_attn.studies.view import Environment, Plots

# An error of this many times the baseline is off the scale: a hundred or a million, both are no attention.
_WORST = 12.0
# Errors below this share of the baseline are rounding.
_ROUNDING = 1e-4

# Column of the mean squared error.
_MSE = "MSE, at largest"

Styles = Mapping[str, Mapping[str, Any]]


def tables(records: Sequence[Record], environment: Environment) -> list[Table]:
    """Errors by input and size, and the mean squared one at the largest size; or kernel entries."""
    if _of_kernel(records):
        return kernel_view.tables(records)
    quantity = quantity_in(records)
    squared = panels(records, "output_mse") if quantity == RELATIVE else ()
    shown = []
    for panel in panels(records, quantity):
        match = next((match for match in squared if match.title == panel.title), None)
        shown += [_table(panel, quantity, match), *_share_tables(panel)]
    return shown


def sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """Backends that are useful; or agreement with theory."""
    if _of_kernel(records):
        return kernel_view.sentences(records)
    shown = panels(records, quantity_in(records))
    useful = _useful([panel for panel in shown if panel.source != "gaussian"] or shown)
    return [] if useful is None else [useful]


def plots(records: Sequence[Record], environment: Environment) -> Plots:
    if _of_kernel(records):
        return kernel_view.plots(records)
    return {"error": error_plot(records)} if any(record.status == "ok" for record in records) else {}


def _of_kernel(records: Sequence[Record]) -> bool:
    return any(record.case.of == "kernel" for record in records)


def show_point(point: ErrorPoint) -> str:
    """Cell of the value, with half the width of its interval where there were several samples."""
    shown = show_error(point.value)
    if point.samples == 1 or not point.value:
        return shown
    shown = show_error(float(rounded(point.value, point.low, point.high)))
    spread = max(point.high - point.value, point.value - point.low) / point.value
    undecided = is_wide(point.value, point.low, point.high)
    return f"{shown}{UNDECIDED}\tinterval beyond ×3" if undecided else f"{shown}\t±{100 * spread:.0f} %"


def _table(panel: Panel, quantity: str, squared: Panel | None) -> Table:
    points = [point for curve in panel.curves for point in curve.points]
    sizes = _columns(points)
    odd = {curve.label for curve in panel.curves for p in curve.points if (p.size or 0) - 1 in sizes}
    rows = []
    if panel.yardstick is not None:
        mean = () if squared is None else (show_error(squared.yardstick or 0.0),)
        rows.append((UNIFORM_ATTENTION, show_error(panel.yardstick), *[""] * len(sizes), *mean))
    for curve in panel.curves:
        match = squared and squared.curve(curve.label)
        mean = () if squared is None else (show_error(match.points[-1].value) if match else "",)
        rows.append((*_row(curve, sizes, show_point), *mean))
    meaning = interval(points)
    notes = (
        *([CONCATENATED_NOTE] if panel.source == CONCATENATED else []),
        *([f"{meaning[0].upper()}{meaning[1:]}."] if meaning else []),
        *([f"{', '.join(sorted(odd))} = size + 1."] if odd else []),
        *mark_notes(rows),
        *failure_notes(panel.failed),
    )
    columns = ("backend", "fixed", *map(str, sizes), *(() if squared is None else (_MSE,)))
    table = Table(f"{NAMES[quantity]}: {panel.title}", columns, tuple(rows), notes)
    return table.compared(errors=columns[2:])


def _row(curve: ErrorCurve, sizes: Sequence[int], show: Callable[[ErrorPoint], str]) -> tuple[str, ...]:
    """Cells of a curve: its label, its point without a size, then its sizes."""
    fixed = next((show(point) for point in curve.points if point.size is None), "")
    return curve.label, fixed, *(show(point) if (point := curve.at(size)) else "" for size in sizes)


def _show_shares(point: ErrorPoint) -> str:
    mass, density = point.record.covered_mass, point.record.density
    return f"{100 * mass:.3g} / {100 * density:.3g}" if density else ""


def _share_tables(panel: Panel) -> list[Table]:
    """Softmax weight and keys read at every size; no table where all keys are read."""
    points = [point for curve in panel.curves for point in curve.points]
    if all(point.record.density in (None, 1) for point in points):
        return []
    sizes = _columns(points)
    rows = [row for curve in panel.curves if any((row := _row(curve, sizes, _show_shares))[1:])]
    columns = ("backend", "fixed", *map(str, sizes))
    return [Table(f"Weight read / keys read, %: {panel.title}", columns, tuple(rows), (READ_NOTE,))]


def _columns(points: Sequence[ErrorPoint]) -> list[int]:
    """Sizes, without an odd one that stands for the even size before it."""
    measured = {point.size for point in points if point.size is not None}
    return sorted(size for size in measured if size - 1 not in measured)


def _useful(shown: Sequence[Panel]) -> str | None:
    """What is below uniform attention on every input, and from which size on."""
    if not shown or any(panel.yardstick is None for panel in shown):
        return None
    texts = []
    for label in dict.fromkeys(curve.label for panel in shown for curve in panel.curves):
        pairs = [(panel.curve(label), panel.yardstick or 0.0) for panel in shown]
        sizes = [below_from(curve, yardstick) if curve else None for curve, yardstick in pairs]
        if None not in sizes:
            points = [point for curve, _ in pairs if curve for point in curve.points]
            counted = all(operations_share(point.record) is not None for point in points)
            remark = "" if counted else " (operations not counted)"
            texts.append(f"{label} from size {max(size for size in sizes if size is not None)}{remark}")
    names = ", ".join(texts) or "nothing measured here"
    return f"Below uniform attention on every input, with fewer operations than exact: {names}."


def error_plot(records: Sequence[Record], y: str = RELATIVE) -> Plot:
    """The error of every backend against its size, a chart for each input."""
    quantity = quantity_in(records, y)
    shown = panels(records, quantity)
    styles = line_styles(
        list({curve.label: curve.backend for panel in shown for curve in panel.curves}.items())
    )
    # Inputs of one source share a scale, so that they can be compared.
    scales = {
        source: _limits([panel for panel in shown if panel.source == source])
        for source in {panel.source for panel in shown}
    }
    charts = [_chart(panel, styles, scales[panel.source], quantity) for panel in shown]
    text = interval([point for panel in shown for curve in panel.curves for point in curve.points])
    bands = f"; lines and bands: {text}" if text else ""
    conditions = f"reference in float64{bands}; errors below {_ROUNDING:g} of uniform attention are not drawn"
    title = f"{NAMES[quantity]} against exact softmax attention"
    return Plot(title, conditions, in_rows(charts, 1 if len(shown) == 1 else 2))


def _chart(panel: Panel, styles: Styles, scale: tuple[float, float], quantity: str) -> Chart:
    low, high = scale
    above = [curve for curve in panel.curves if min(point.value for point in curve.points) > high]
    series = []
    if panel.yardstick is not None:
        series.append(Series(UNIFORM_ATTENTION, (), (panel.yardstick,), UNIFORM_STYLE))
    for curve in panel.curves:
        if curve not in above and max(point.value for point in curve.points) >= low:
            series.append(_series(curve, styles[curve.label]))
    sizes = {point.size for curve in panel.curves for point in curve.points if point.size is not None}
    return Chart(
        Axis(
            "features, rank or window",
            "log2",
            "{:.0f}".format,
            [size for size in sizes if size - 1 not in sizes],
        ),
        Axis(NAMES[quantity].lower(), "log", show_error, limits=scale),
        tuple(series),
        panel.title,
        tuple(map(_off_scale, above)),
        apart=True,
    )


def _series(curve: ErrorCurve, style: Mapping[str, Any]) -> Series:
    points = [point for point in curve.points if point.size is not None]
    if not points:
        return Series(curve.label, (), (curve.points[0].value,), {**style, "marker": ""})
    x, y = (tuple(getattr(point, name) for point in points) for name in ("size", "value"))
    low, high = edges(point[1:4] for point in points)
    return Series(curve.label, x, y, {**style, "markersize": 4, "linewidth": 1.5}, low, high)


def _off_scale(curve: ErrorCurve) -> str:
    values = [point.value for point in curve.points]
    ends = dict.fromkeys((show_error(min(values)), show_error(max(values))))
    return f"{curve.label} off scale ({'–'.join(ends)})"


def _limits(shown: Sequence[Panel]) -> tuple[float, float]:
    """From below the smallest error that is no rounding to above the largest that is no nonsense."""
    yardsticks = [panel.yardstick for panel in shown if panel.yardstick]
    floor, worst = _ROUNDING * min(yardsticks, default=1.0), _WORST * max(yardsticks, default=1.0)
    lines = [curve.points for panel in shown for curve in panel.curves]
    points = [point for line in lines if min(point.value for point in line) <= worst for point in line]
    real = [edge for point in points for edge in (point.value, point.low) if edge > floor] + yardsticks
    return min(real, default=1.0) / 1.4, min(max(real, default=1.0), worst) * 1.8
