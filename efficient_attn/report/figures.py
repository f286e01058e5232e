"""Figures as plain data: rows of charts, each with its axes and its series."""

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

from efficient_attn.report.palette import DISPLAY_NAMES

# Beyond this the margins of an axis are no floating-point numbers any more.
LARGEST = 1e300


class Series(NamedTuple):
    """A line, markers, or one value across the chart.

    Attributes:
        x: Empty for a horizontal line at the only `y`; likewise `y` is empty for a vertical line.
        style: Keyword arguments of matplotlib's `plot`.
        low, high: Edges of an interval; None leaves a gap.
        bars: The interval is drawn as error bars, not as a band.
        entry: Text in the legend; None is the label, an empty text leaves the series out.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    style: Mapping[str, Any]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    bars: bool = False
    entry: str | None = None

    @property
    def text(self) -> str:
        """Text in the legend."""
        return self.label if self.entry is None else self.entry


class Axis(NamedTuple):
    """One axis of a chart.

    Attributes:
        scale: `linear`, `log` (decades) or `log2` (powers of two).
        show: Text of a tick.
        ticks: Places, thinned to the room there is, or {place: text}, kept as they are.
        limits: The ends; the first is larger on an inverted axis.
        inside: Texts of ticks stand within the chart, without marks.
    """

    label: str = ""
    scale: str = "linear"
    show: Callable[[float], str] = "{:g}".format
    ticks: Sequence[float] | Mapping[float, str] = ()
    limits: tuple[float, float] | None = None
    inside: bool = False

    def holds(self, value: float | None) -> bool:
        """Whether the axis has a place for the value."""
        return value is not None and (self.scale == "linear" or 0 < value < LARGEST)


class Chart(NamedTuple):
    """One pair of axes.

    Attributes:
        notes: Lines below the title.
        apart: Series whose markers coincide are moved sideways.
        height: Inches, at full width; None follows the width.
        draw: Draws on the matplotlib axes whatever is no series.
    """

    x: Axis
    y: Axis
    series: tuple[Series, ...] = ()
    title: str = ""
    notes: tuple[str, ...] = ()
    apart: bool = False
    height: float | None = None
    draw: Callable[[Any], None] | None = None

    def drawable(self) -> "Chart":
        """The chart with the points that its axes can hold."""
        kept = (self._held(one) for one in self.series)
        return self._replace(series=tuple(one for one in kept if len(one.x) or len(one.y)))

    def _held(self, one: Series) -> Series:
        if not (len(one.x) and len(one.y)):
            good = all(map(self.x.holds, one.x)) and all(map(self.y.holds, one.y))
            return one if good else one._replace(x=(), y=())
        kept = [self.x.holds(x) and self.y.holds(y) for x, y in zip(one.x, one.y, strict=True)]
        low, high = (
            tuple(edge if self.y.holds(edge) else None for edge in compress(edges, kept))
            for edges in (one.low, one.high)
        )
        return one._replace(
            x=tuple(compress(one.x, kept)), y=tuple(compress(one.y, kept)), low=low, high=high
        )


class Plot(NamedTuple):
    """A figure: title, conditions, rows of charts and a legend.

    Attributes:
        rows: None leaves a gap, so that the charts of a shorter row keep their width.
        legend: Series of the legend; None: series of all charts.
    """

    title: str
    conditions: str
    rows: tuple[tuple[Chart | None, ...], ...]
    legend: tuple[Series, ...] | None = None

    @property
    def charts(self) -> tuple[Chart, ...]:
        """All charts, row by row."""
        return tuple(chart for row in self.rows for chart in row if chart is not None)

    @property
    def names(self) -> list[str]:
        """Names of all series and ticks."""
        axes = [axis for chart in self.charts for axis in (chart.x, chart.y)]
        ticks = [text for axis in axes if isinstance(axis.ticks, Mapping) for text in axis.ticks.values()]
        return [one.label for chart in self.charts for one in chart.series if one.label] + ticks

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(chart.draw or chart.drawable().series for chart in self.charts)

    @property
    def entries(self) -> tuple[Series, ...]:
        """Series of the legend, each text once."""
        named = [one for chart in self.charts for one in chart.drawable().series]
        found = {one.text: one for one in (named if self.legend is None else self.legend) if one.text}
        return tuple(found.values())

    def map_charts(self, change: Callable[[Chart], Chart]) -> "Plot":
        """The plot with every chart changed."""
        rows = tuple(tuple(chart and change(chart) for chart in row) for row in self.rows)
        return self._replace(rows=rows)

    def map_series(self, change: Callable[[Series], Series]) -> "Plot":
        """The plot with every series of charts and legend changed."""
        legend = None if self.legend is None else tuple(map(change, self.legend))
        charts = self.map_charts(lambda chart: chart._replace(series=tuple(map(change, chart.series))))
        return charts._replace(legend=legend)

    def renamed(self, labels: Mapping[str, str]) -> "Plot":
        """The plot with {label: text} in place of the labels of series and ticks."""
        known = {**DISPLAY_NAMES, **labels}

        def series(one: Series) -> Series:
            text = known.get(one.label, one.label)
            entry = None if one.entry is None else one.entry.replace(one.label, text)
            return one._replace(label=text, entry=entry)

        def axis(one: Axis) -> Axis:
            if not isinstance(one.ticks, Mapping):
                return one
            return one._replace(ticks={place: known.get(text, text) for place, text in one.ticks.items()})

        charts = self.map_charts(lambda chart: chart._replace(x=axis(chart.x), y=axis(chart.y)))
        return charts.map_series(series)


def in_rows(charts: Sequence[Chart], columns: int = 2) -> tuple[tuple[Chart | None, ...], ...]:
    """Charts in rows; the last row keeps the width of the others."""
    rows: list[tuple[Chart | None, ...]]
    rows = [tuple(charts[start : start + columns]) for start in range(0, len(charts), columns)]
    if len(rows) > 1:
        rows[-1] += (None,) * (columns - len(rows[-1]))
    return tuple(rows)
