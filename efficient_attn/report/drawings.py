"""Plots for a page: small figures side by side, the names of their lines in a legend of the page's own."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from efficient_attn.analysis.accuracy import panels, quantity_in
from efficient_attn.analysis.comparison import DEFAULT_MAX_ERROR
from efficient_attn.analysis.curves import QUANTITIES
from efficient_attn.analysis.head_errors import HEADS
from efficient_attn.report import error_plot
from efficient_attn.report import plot as cost_plot
from efficient_attn.report.comparison_plot import COMPARISON, plot_comparisons
from efficient_attn.report.error_table import title
from efficient_attn.report.harmless import plain
from efficient_attn.report.head_errors import plot_heads
from efficient_attn.report.kernel_plot import OVER, plot_kernel
from efficient_attn.report.svg import inline, swatch
from efficient_attn.sweep.records import Record

_SIZE_INCHES = (4.9, 3.4)


class Panel(NamedTuple):
    """One figure: a line above it, and an `svg` element."""

    caption: str
    svg: str


class Drawing(NamedTuple):
    """Figures that belong together.

    Attributes:
        legend: A piece of each line as `svg`, empty where there is no line, and its name.
    """

    title: str
    conditions: str
    legend: tuple[tuple[str, str], ...]
    panels: tuple[Panel, ...]


def draw(
    records: Sequence[Record],
    quantities: Sequence[str],
    *,
    name: str,
    beside: Sequence[Sequence[Record]] = (),
    max_error: float = DEFAULT_MAX_ERROR,
) -> list[Drawing]:
    """The quantities drawn.

    Args:
        name: Keeps the ids of this run apart from those of another.
        beside: The records of each run that shares the axes' scale.
        max_error: That a comparison asked about.
    """
    costs = [quantity for quantity in quantities if quantity in QUANTITIES]
    made = [_costs(records, costs, name, beside)] if costs else []
    whole: dict[str, Any] = {quantity: partial(plot_kernel, x=axis) for quantity, axis in OVER.items()}
    whole |= {
        HEADS: plot_heads,
        COMPARISON: partial(plot_comparisons, max_error=max_error),
    }
    errors = [quantity for quantity in quantities if quantity not in (*costs, *whole)]
    made += [_errors(records, quantity, name) for quantity in errors]
    return made + [
        figure(whole[quantity](records), f"{name}-{quantity}") for quantity in quantities if quantity in whole
    ]


def figure(ax: Any, name: str) -> Drawing:
    """A figure of several panels with a legend of its own."""
    figure = ax.figure
    heading, _, conditions = figure.get_suptitle().partition("\n")
    figure.suptitle("")
    described = "; ".join(one.get_title(loc="left") for one in figure.axes if one.axison)
    caption = plain(f"Panels: {described}")
    return Drawing(heading, conditions, (), (Panel(caption, _svg(ax, name, heading, caption)),))


def _costs(
    records: Sequence[Record], quantities: Sequence[str], name: str, beside: Sequence[Sequence[Record]]
) -> Drawing:
    """Costs share lines and conditions, hence a legend."""
    shown, conditions = [], ""
    lines: dict[str, Any] = {}
    panelled = [
        (quantity, *panel) for quantity in quantities for panel in cost_plot.subjects(records, quantity)
    ]
    groups = {quantity: [group for of, _, group in panelled if of == quantity] for quantity in quantities}
    for number, (quantity, subject, group) in enumerate(panelled):
        ax = _axes()
        if corners := [
            (point.tokens, edge)
            for run in beside
            for curve in cost_plot.drawable(
                dict(cost_plot.subjects(run, quantity)).get(subject, []), quantity
            )
            for point in curve.measured
            for edge in (point.low, point.high)
            if edge is not None
        ]:
            ax.update_datalim(corners)
        cost_plot.plot(
            group, y=quantity, ax=ax, bare=True, styles=cost_plot.styles_of(groups[quantity], quantity)
        )
        heading, told = cost_plot.headline(group, quantity)
        # The first says the most: that of time names its interval.
        conditions = conditions or told
        # From the top of the plot down, as the lines end.
        ends = sorted(ax.lines, key=lambda line: -line.get_ydata()[-1])
        lines |= {line.get_label(): line for line in ends if line.get_label() not in lines}
        shown.append(Panel(heading, _svg(ax, f"{name}-cost-{number}", heading, _described(group, quantity))))
    return Drawing("Time and memory against tokens", conditions, _legend(lines.values()), tuple(shown))


def _errors(records: Sequence[Record], quantity: str, name: str) -> Drawing:
    errors = [record for record in records if record.case.kind == "error" and record.case.of != "kernel"]
    quantity = quantity_in(errors, quantity)
    shown = panels(errors, quantity)
    axes = [_axes() for _ in shown]
    if axes:
        error_plot.plot(errors, y=quantity, ax=axes)
    heading, conditions = error_plot.headline(shown, quantity)
    drawn = []
    for number, (ax, panel) in enumerate(zip(axes, shown, strict=True)):
        ax.set_title("", loc="left")
        names = ", ".join(curve.label for curve in panel.curves)
        description = f"Lines of {names} against size, and the mean of V as a line across."
        drawn.append(Panel(plain(title(panel)), _svg(ax, f"{name}-error-{number}", heading, description)))
    styles = error_plot.styles_of(shown)
    return Drawing(heading, conditions, _legend(error_plot.handles(shown, styles)), tuple(drawn))


def _axes() -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=_SIZE_INCHES, layout="constrained").subplots()


def _svg(ax: Any, name: str, heading: str, description: str) -> str:
    return inline(ax.figure, name=name, title=heading, description=plain(description))


def _described(records: Sequence[Record], quantity: str) -> str:
    drawn = cost_plot.drawable(records, quantity)
    tokens = [point.tokens for curve in drawn for point in curve.measured]
    names = ", ".join(curve.label for curve in drawn)
    return f"Lines of {names} from {min(tokens)} to {max(tokens)} tokens; the numbers are in the tables."


def _legend(lines: Any) -> tuple[tuple[str, str], ...]:
    return tuple((swatch(line), str(line.get_label())) for line in lines)
