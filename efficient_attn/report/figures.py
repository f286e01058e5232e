"""Figures as plain data, and the styles of lines."""

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

from efficient_attn.measure.variants import CEILING

INK, MUTED, GRID = "#222222", "#6b6b6b", "#e3e3e3"

# The colours of Okabe and Ito (2008), made for all kinds of colour vision; exact attention is black.
_COLOURS = {
    "exact": ("#000000", "o"),
    "exact-dense": ("#7a7a7a", "s"),
    "window": ("#009e73", "^"),
    "linformer": ("#d98c00", "D"),
    "performer-positive": ("#0072b2", "v"),
    "performer-trig": ("#cc4c88", "P"),
    "performer-hyperbolic": ("#3a9bd9", "<"),
    "performer-oprf": ("#7b4fb5", "p"),
    "performer-full": ("#d55e00", "X"),
    "window-clusters": ("#00573f", "8"),
    "nystrom": ("#9c2f3b", "H"),
    "oracle-topk": ("#8c8c00", "*"),
    "bigbird": ("#a0522d", "d"),
    "block-topk": ("#1f5f8b", "h"),
    "linear-elu": ("#8a6d00", ">"),
    "linear-relu": ("#8b4513", ">"),
    "linear-hedgehog": ("#008b8b", ">"),
    "linear-taylor-1": ("#5f6f1f", ">"),
    "linear-taylor-2": ("#9a5b8f", ">"),
    CEILING: (MUTED, ""),
}
_FURTHER_COLOURS = (("#b8860b", "s"), ("#4b6c9e", "H"), ("#a83279", "D"), ("#556b2f", "p"))
# Fillings of markers and strokes of lines of a backend and its variants.
_FILLS = ("full", "none", "left", "bottom")
_STROKES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))

# The dashed line of uniform attention and of guesses, and the thin grey line of a limit.
UNIFORM_STYLE: dict[str, Any] = {"color": INK, "linestyle": (0, (4, 3)), "linewidth": 1.2, "marker": ""}
LIMIT_STYLE: dict[str, Any] = {"color": MUTED, "linestyle": "-", "linewidth": 1.1, "marker": ""}

# With larger values the margins of an axis would overflow.
LARGEST = 1e300


class Series(NamedTuple):
    """A line, markers, or one value across the chart.

    Attributes:
        x: Empty for a horizontal line at the only `y`; likewise `y` is empty for a vertical line.
        style: Keyword arguments of matplotlib's `plot`.
        low, high: Edges of an interval; None leaves a gap.
        bars: Whether the interval is drawn as error bars, not as a band.
        hints: Status of each point on interactive pages; empty: all are measured.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    style: Mapping[str, Any]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    bars: bool = False
    hints: Sequence[str] = ()


class Axis(NamedTuple):
    """One axis of a chart.

    Attributes:
        scale: `linear`, `log` (decades) or `log2` (powers of two).
        ticks: Places, thinned to fit, or {place: text}, drawn as they are.
        limits: Ends of the axis. The first is larger on an inverted axis.
    """

    label: str = ""
    scale: str = "linear"
    show: Callable[[float], str] = "{:g}".format
    ticks: Sequence[float] | Mapping[float, str] = ()
    limits: tuple[float, float] | None = None

    def holds(self, value: float | None) -> bool:
        """Whether the axis can show the value."""
        return value is not None and (self.scale == "linear" or 0 < value < LARGEST)


class Chart(NamedTuple):
    """One pair of axes.

    Attributes:
        height: Inches, at full width; None follows the width.
        draw: Function that draws parts other than series on the matplotlib axes.
    """

    x: Axis
    y: Axis
    series: tuple[Series, ...] = ()
    title: str = ""
    notes: tuple[str, ...] = ()
    height: float | None = None
    draw: Callable[[Any], None] | None = None

    def drawable(self) -> "Chart":
        """Chart with the points that its axes can hold."""
        drawn = []
        for line in self.series:
            if len(line.x) and len(line.y):
                places = [self.x.holds(x) and self.y.holds(y) for x, y in zip(line.x, line.y, strict=True)]
                low, high = (
                    tuple(edge if self.y.holds(edge) else None for edge in compress(edges, places))
                    for edges in (line.low, line.high)
                )
                x, y = tuple(compress(line.x, places)), tuple(compress(line.y, places))
                hints = tuple(compress(line.hints, places))
                line = line._replace(x=x, y=y, low=low, high=high, hints=hints)
            elif not (all(map(self.x.holds, line.x)) and all(map(self.y.holds, line.y))):
                continue
            if len(line.x) or len(line.y):
                drawn.append(line)
        return self._replace(series=tuple(drawn))


class Plot(NamedTuple):
    """A figure: title, conditions, rows of charts and a legend.

    Attributes:
        rows: None leaves a gap, so that the charts of a shorter row keep their width.
    """

    title: str
    conditions: str
    rows: tuple[tuple[Chart | None, ...], ...]

    @property
    def charts(self) -> tuple[Chart, ...]:
        return tuple(chart for row in self.rows for chart in row if chart is not None)

    @property
    def is_empty(self) -> bool:
        return not any(chart.draw or chart.drawable().series for chart in self.charts)

    def drawable(self) -> "Plot":
        """Copy with the points that the axes can hold."""
        rows = tuple(tuple(chart and chart.drawable() for chart in row) for row in self.rows)
        return self._replace(rows=rows)


def in_rows(charts: Sequence[Chart], columns: int = 2) -> tuple[tuple[Chart | None, ...], ...]:
    """Charts in rows of equal width."""
    rows: list[tuple[Chart | None, ...]]
    rows = [tuple(charts[start : start + columns]) for start in range(0, len(charts), columns)]
    if len(rows) > 1:
        rows[-1] += (None,) * (columns - len(rows[-1]))
    return tuple(rows)


def line_styles(lines: Sequence[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """Styles by label for lines (label, backend), in their order.

    Variants of a backend share its colour and marker, which is filled for the backend without options.
    """
    further = [name for name in dict.fromkeys(backend for _, backend in lines) if name not in _COLOURS]
    styles: dict[str, dict[str, Any]] = {}
    for label, backend in lines:
        alike = sorted((drawn for drawn, name in lines if name == backend), key=lambda x: x != backend)
        variant = alike.index(label)
        colour, marker = (
            _COLOURS.get(backend) or _FURTHER_COLOURS[further.index(backend) % len(_FURTHER_COLOURS)]
        )
        styles[label] = {
            "color": colour,
            "marker": marker,
            "fillstyle": _FILLS[variant % len(_FILLS)],
            "markersize": 5,
            # Identity attention computes nothing, so its line is not solid.
            "linestyle": _STROKES[(variant + (backend == CEILING) * 2) % len(_STROKES)],
            "linewidth": 2.4 if backend == "exact" else 1.8,
        }
    return styles
