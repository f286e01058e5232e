"""Errors of outputs or weights over the size of the approximation, as tables, sentences and plots."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import UNIFORM_ATTENTION, sized
from efficient_attn.report import text
from efficient_attn.report.figures import UNIFORM_STYLE, Axis, Chart, Plot, Series, in_rows, line_styles
from efficient_attn.report.table import NOT_MEASURED, Table
from efficient_attn.report.text import show_correlation, show_error
from efficient_attn.runs.store import over_budget
from efficient_attn.runs.study import Run, Settled
from efficient_attn.stats.estimates import FEWEST_FOR_95, bland, grouped, middle, operations_share
from efficient_attn.studies.mse import kernel_view, norms_view, weights_view

RELATIVE, SQUARED, WEIGHTS = "output_relative_error", "output_mse", "weights_relative_error"
CORRELATION = "output_correlation"
NAMES = {
    RELATIVE: "Relative output error, √(MSE / mean square)",
    SQUARED: "MSE of the output",
    WEIGHTS: "Relative error of the attention weights",
}

# Headings of the last column by its option.
_COLUMNS = {"mse": "MSE", "corr": "correlation"}
_STARRED = {"mse": "", "corr": ", largest correlation"}
# Errors below this share of uniform attention's are rounding.
_ROUNDING = 1e-4
# Smaller errors are shown with an exponent.
_EXPONENT = 1e-3
# Decades of an axis, and room at its ends.
_DECADES, _MARGIN = 1e6, 1.5
# Points on the edges of an axis: exact from there on, and beyond the axis.
_EXACT_MARK = {"marker": "o", "markersize": 7, "fillstyle": "none", "linestyle": "none", "clip_on": False}
_BEYOND_MARK = {"marker": "^", "markersize": 7, "linestyle": "none", "clip_on": False}


class ErrorPoint(NamedTuple):
    """Error at one size.

    Attributes:
        size: Features, rank or window; None for a backend without a size.
        value: Median over draws.
        low, high: 95 % interval of the value.
        samples: Number of draws.
    """

    size: int | None
    value: float
    low: float
    high: float
    samples: int
    record: Record


Curve = Sequence[ErrorPoint]


class Panel(NamedTuple):
    """All measurements on one input.

    Attributes:
        inputs: Name of the inputs, such as `gaussian(norm=0.5)`.
        shape: `4096 tokens, 1 head of 16`.
        curves: Points by label, in rising order of size.
        failed: Records without a value, each with its reason.
        uniform: Error of uniform attention.
        bounds: Least errors of weights by label and rank.
    """

    inputs: str
    shape: str
    curves: dict[str, list[ErrorPoint]]
    failed: tuple[Record, ...]
    uniform: ErrorPoint | None
    bounds: dict[str, dict[int, float]]

    @property
    def points(self) -> list[ErrorPoint]:
        return [point for points in self.curves.values() for point in points]


def quantity_in(records: Sequence[Record]) -> str:
    """The error that a run measured: of weights, relative, or the mean squared one alone."""
    if any(record.case.of == "weights" for record in records):
        return WEIGHTS
    return RELATIVE if any(record.output_relative_error is not None for record in records) else SQUARED


def panels(records: Iterable[Record], quantity: str) -> list[Panel]:
    """One panel per input, in the order of the records."""
    errors = [record for record in records if record.case.kind == "error" and record.case.of != "kernel"]
    measured = [record for record in errors if (record.case.of == "weights") == (quantity == WEIGHTS)]
    groups = grouped(measured, "inputs", "tokens", "num_heads", "head_dim")
    return [_panel(group, quantity) for group in groups]


def _panel(records: Sequence[Record], quantity: str) -> Panel:
    case = records[0].case
    curves: dict[str, list[ErrorPoint]] = {}
    for record in records:
        if getattr(record, quantity) is not None:
            curves.setdefault(sized(record.case).series, []).append(_point(record, quantity))
    for curve in curves.values():
        curve.sort(key=lambda point: point.size or 0)
    plainest = curves.pop(UNIFORM_ATTENTION, None)
    missing = [record for record in records if record.status != "ok" and getattr(record, quantity) is None]
    # What a backend does not support is said once for all sizes.
    failed = {(r.case.backend, r.reason) if r.status == "unsupported" else r.case.key: r for r in missing}
    heads = "1 head" if case.num_heads == 1 else f"{case.num_heads} heads"
    return Panel(
        inputs=case.inputs,
        shape=f"{case.tokens} tokens, {heads} of {case.head_dim}",
        curves=curves,
        failed=tuple(failed.values()),
        uniform=plainest[0] if plainest else None,
        bounds=weights_view.bounds(records) if quantity == WEIGHTS else {},
    )


def _point(record: Record, quantity: str) -> ErrorPoint:
    draws = getattr(record, f"{quantity}_draws") or [getattr(record, quantity)]
    return ErrorPoint(sized(record.case).size, *middle(draws), record)


def interval(points: Curve) -> str:
    """Words for draws and their interval, empty if every error was measured once."""
    most = max(points, key=lambda point: point.samples, default=None)
    if most is None or most.samples < 2:
        return ""
    edges = "95 % interval" if most.samples >= FEWEST_FOR_95 else "range"
    return f"median of {most.samples} draws, {edges}"


def tables(records: Sequence[Record], run: Run[Settled]) -> list[Table]:
    """Errors by size, one table per input that the budget reached."""
    quantity = quantity_in(records)
    shown = panels(records, quantity)
    column = run.study.column
    outputs = [_table(x, quantity, column) for x in shown if x.curves or not all(map(over_budget, x.failed))]
    for panel in shown:
        outputs += text.deviation_table((curve[-1].record for curve in panel.curves.values()), quantity)
    return [*outputs, *kernel_view.tables([r for r in records if r.case.of == "kernel"])]


def _table(panel: Panel, quantity: str, column: str) -> Table:
    sizes = _even({point.size for point in panel.points if point.size is not None})
    odd = {label for label, curve in panel.curves.items() for x in curve if (x.size or 0) - 1 in sizes}
    fixed = any(point.size is None for point in panel.points)
    places = [None, *sizes] if fixed else sizes
    rows = [
        (label, *(_cell(curve, size) for size in places), _last(curve[-1].record, column))
        for label, curve in panel.curves.items()
    ]
    for label, line in panel.bounds.items():
        rows.append((label, *(show_error(line[x]) if x in line else "" for x in places), NOT_MEASURED))
    if panel.uniform is not None:
        # It has no size.
        errors = [show_error(panel.uniform.value)] * len(places)
        rows.insert(0, (UNIFORM_ATTENTION, *errors, _last(panel.uniform.record, column)))
    heads = [*(["no size"] if fixed else []), *map(str, sizes), f"{_COLUMNS[column]}, largest size"]
    if quantity != RELATIVE and column == "mse":
        heads.pop()
        rows = [row[:-1] for row in rows]
    meaning = interval(panel.points)
    notes = (
        f"Columns: {_size_words(panel.points)}. Starred: smallest error{_STARRED[column]}.",
        *([f"{meaning[0].upper()}{meaning[1:]}: report.html."] if meaning else []),
        *([f"{', '.join(sorted(odd))} = size + 1."] if odd else []),
        *(f"{label}: {weights_view.NOTES[label]}." for label in panel.bounds),
        *([text.CORRELATION_NOTE] if column == "corr" else []),
        *text.mark_notes(rows),
        *text.failure_notes(panel.failed),
    )
    title = f"{NAMES[quantity]}: {text.describe(panel.inputs)}; {panel.shape}"
    table = Table(title, ("backend", *heads), tuple(rows), notes)
    errors, scores = (heads, []) if column == "mse" else (heads[:-1], heads[-1:])
    return table.compared(errors=errors, scores=scores, skip=panel.bounds)


def _size_words(points: Curve) -> str:
    """The sizes of all points in words."""
    options = [point.record.case.options for point in points if point.size is not None]
    features = bool(options) and all("num_features" in names for names in options)
    return "number of features" if features else "features, rank or window"


def _even(sizes: Collection[int]) -> list[int]:
    """Sizes, without an odd one that stands for the even size before it."""
    return sorted(size for size in sizes if size - 1 not in sizes)


def _cell(curve: Curve, size: int | None) -> str:
    sizes = (None,) if size is None else (size, size + 1)
    point = next((point for point in curve if point.size in sizes), None)
    if point is None:
        return ""
    value, tab, words = text.show_spread(*point[1:4], unit=1.0).partition("\t")
    # Small errors have an exponent.
    small = f"{show_error(point.value)}{text.UNDECIDED * value.endswith(text.UNDECIDED)}"
    return f"{small if 0 < point.value < _EXPONENT else value}{tab}{words}"


def _last(record: Record, column: str) -> str:
    """Cell of the last column, median over draws."""
    quantity = CORRELATION if column == "corr" else SQUARED
    if getattr(record, quantity) is None:
        return NOT_MEASURED
    value = _point(record, quantity).value
    return f"{show_correlation(value)}{' bland' * bland(record)}" if column == "corr" else show_error(value)


def sentences(records: Sequence[Record], run: Run[Settled]) -> list[str]:
    """Useful backends or agreement with theory, then points beyond the budget."""
    shown = panels(records, quantity_in(records))
    real = [panel for panel in shown if not panel.inputs.startswith("gaussian")]
    texts = weights_view.sentences(real or shown)
    texts += _useful(real) if real else _smallest(shown)
    texts += norms_view.sentences(shown)
    texts += kernel_view.agreement([record for record in records if record.case.of == "kernel"])
    points = Counter(text.describe(record.case.inputs) for record in records)
    skipped = Counter(text.describe(record.case.inputs) for record in records if over_budget(record))
    if skipped:
        places = "; ".join(f"{name} ({count} of {points[name]})" for name, count in skipped.items())
        texts.append(f"{text.skipped_note(skipped.total())} Skipped: {places}.")
    return texts


def _smallest(shown: Sequence[Panel]) -> list[str]:
    """The backend of the smallest error at its largest size, beside uniform attention."""
    texts = []
    for panel in shown:
        last = {label: curve[-1] for label, curve in panel.curves.items() if curve[-1].size is not None}
        if len(last) > 1:
            label, point = min(last.items(), key=lambda item: item[1].value)
            ratio = point.value / panel.uniform.value if panel.uniform else None
            beside = "" if ratio is None else f", {text.two_digits(ratio)}× uniform attention's"
            beside += ", bland" if bland(point.record) else ""
            inputs = text.describe(panel.inputs)
            texts.append(f"{inputs}: {label} at {point.size} ({show_error(point.value)}{beside})")
    return [f"Smallest error. {'; '.join(texts)}."] if texts else []


def _useful(shown: Sequence[Panel]) -> list[str]:
    """Backends below uniform attention on every input, with the size from which on they are."""
    uniforms = [panel.uniform.value for panel in shown if panel.uniform]
    if len(uniforms) < len(shown):
        return []
    texts, open_labels = [], []
    for label in dict.fromkeys(label for panel in shown for label in panel.curves):
        curves = [panel.curves.get(label, []) for panel in shown]
        pairs = [*zip(curves, uniforms, strict=True)]
        sizes = [below_from(curve, uniform) for curve, uniform in pairs]
        if None not in sizes:
            counted = all(operations_share(x.record) is not None for curve in curves for x in curve)
            remark = "" if counted else " (operations not counted)"
            texts.append(f"{label} from size {max(size for size in sizes if size is not None)}{remark}")
        elif None not in [below_from(curve, uniform, "low") for curve, uniform in pairs]:
            open_labels.append(label)
    place, told = "Below uniform attention everywhere", []
    if texts:
        told.append(f"{place}, with fewer operations than exact: {', '.join(texts)}.")
    if open_labels:
        draws = max(point.samples for panel in shown for point in panel.points)
        undecided = f"not decided with {draws} draws (try --draws {4 * draws})"
        told.append(f"{place}, {undecided}: {', '.join(open_labels)}.")
    return told or ["No backend beats uniform attention on every input with fewer operations than exact."]


def below_from(curve: Curve, uniform: float, edge: str = "high") -> int | None:
    """The smallest size that saves operations from which on an edge of intervals is below."""
    size = None
    for point in reversed([point for point in curve if (operations_share(point.record) or 0) < 1]):
        if point.size is None or getattr(point, edge) >= uniform:
            break
        size = point.size
    return size


def plots(records: Sequence[Record], run: Run[Settled]) -> dict[str, Plot]:
    """The error of every backend against its size, a chart for each input, and errors of kernel entries."""
    entries = kernel_view.plots([record for record in records if record.case.of == "kernel"])
    quantity = quantity_in(records)
    shown = [panel for panel in panels(records, quantity) if panel.curves]
    if not shown:
        return entries
    points = [point for panel in shown for point in panel.points]
    backends = {label: x[0].record.case.backend for panel in shown for label, x in panel.curves.items()}
    styles, meaning = line_styles(list(backends.items())), interval(points)
    low, high = _limits(shown)
    alike = high <= _DECADES * low
    lengths, shapes = ({fact(panel) for panel in shown} for fact in (_length, lambda panel: panel.shape))
    charts = []
    for panel in shown:
        title = text.describe(panel.inputs) + (f", {_length(panel)}" if len(lengths) > 1 else "")
        charts.append(_chart(panel, styles, (low, high) if alike else _limits([panel]), quantity, title))
    parts = [*(shapes if len(shapes) == 1 else ()), "float64 reference"]
    if meaning:
        parts.append(f"{meaning} within ×3")
    styles_drawn = [line.style for chart in charts for line in chart.series]
    if any(style.items() >= _EXACT_MARK.items() for style in styles_drawn):
        parts.append("circle on the lower edge: exact from there on")
    if any(style.items() >= _BEYOND_MARK.items() for style in styles_drawn):
        parts.append("arrow: beyond the axis")
    if any(len(panel.bounds) == 1 for panel in shown):
        parts.append("no unbiased estimate of causal weights")
    rows = in_rows(charts, 1 if len(shown) == 1 else 2)
    measured = "attention weights" if quantity == WEIGHTS else "output"
    plot = Plot(f"Error of the {measured} by {_size_words(points)}", "; ".join(parts), rows)
    return {"error": plot, **entries}


def _length(panel: Panel) -> str:
    return panel.shape.partition(",")[0]


def _limits(shown: Sequence[Panel]) -> tuple[float, float]:
    """Around all errors that are no rounding, at most six decades from the smallest."""
    values = [panel.uniform.value for panel in shown if panel.uniform]
    for panel in shown:
        errors = [point.value for point in panel.points]
        errors += [error for line in panel.bounds.values() for error in line.values()]
        values += [error for error in errors if error > _rounding(panel)]
    low, high = min(values, default=1.0), max(values, default=1.0)
    return low / _MARGIN, min(high, low * _DECADES) * _MARGIN


def _rounding(panel: Panel) -> float:
    return _ROUNDING * (panel.uniform.value if panel.uniform else 1.0)


def _chart(
    panel: Panel, styles: Mapping[str, Any], limits: tuple[float, float], quantity: str, title: str
) -> Chart:
    series = list[Series]()
    if panel.uniform is not None:
        series.append(Series(UNIFORM_ATTENTION, (), (panel.uniform.value,), UNIFORM_STYLE))
    for label, line in panel.bounds.items():
        ranks = [rank for rank, error in line.items() if error > _rounding(panel)]
        series.append(Series(label, ranks, [line[rank] for rank in ranks], weights_view.STYLES[label]))
    for label, curve in panel.curves.items():
        if curve[0].size is None and limits[0] < curve[0].value < limits[1]:
            series.append(Series(label, (), (curve[0].value,), {**styles[label], "marker": ""}))
        if curve[0].size is not None:
            series += _series(label, curve, styles[label], limits, _rounding(panel))
    sizes = _even({point.size for point in panel.points if point.size is not None})
    x = Axis(_size_words(panel.points), "log2", "{:.0f}".format, sizes)
    # Lines of a label end between its terms, not within the formula.
    label = NAMES[quantity].replace("R", "r").replace("MSE / mean square", "MSE\u00a0/\u00a0mean\u00a0square")
    y = Axis(label, "log", show_error, limits=limits)
    return Chart(x, y, tuple(series), title)


def _series(
    label: str, curve: Curve, style: Mapping[str, Any], limits: tuple[float, float], rounding: float
) -> list[Series]:
    """A line with its band, and marks where it becomes exact and where it leaves the axis."""
    exact = next((number for number, point in enumerate(curve) if point.value <= rounding), len(curve))
    points = curve[:exact]
    x, y = ([getattr(point, name) for point in points] for name in ("size", "value"))
    low, high = text.edges(point[1:4] for point in points)
    shown = {**style, "markersize": 4, "linewidth": 1.5}
    if exact == len(curve):
        lines = [Series(label, x, y, shown, low, high)]
    else:
        end = curve[exact]
        at, hints = [float(end.size or 0)], [f"exact: error {show_error(end.value)}"]
        down = Series(label, [*x, *at], [*y, limits[0]], shown, [*low, None], [*high, None])
        lines = [
            down._replace(hints=["measured"] * exact + hints),
            Series("", at, [limits[0]], {**style, **_EXACT_MARK}, hints=hints),
        ]
    beyond = [point for point in points if point.value > limits[1]]
    if beyond:
        hints = [f"error {show_error(point.value)}" for point in beyond]
        edge = [limits[1]] * len(beyond)
        places = [float(point.size or 0) for point in beyond]
        lines.append(Series("", places, edge, {**style, **_BEYOND_MARK}, hints=hints))
    return lines
