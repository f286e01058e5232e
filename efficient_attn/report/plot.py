"""Time and memory against tokens, on logarithmic axes, each line named where it ends."""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from efficient_attn.analysis.curves import Curve, Point, by_subject, curves
from efficient_attn.report.files import write
from efficient_attn.report.harmless import plain
from efficient_attn.report.line_names import line_name, name_lines
from efficient_attn.report.palette import INK, MUTED, line_styles
from efficient_attn.sweep.amounts import show_bytes, show_seconds
from efficient_attn.sweep.records import Case, Record

_TITLES = {
    "time_s": "Time of one call",
    "peak_bytes": "Peak memory of one call, beside its inputs",
    "parameter_bytes": "Parameters and buffers",
    "state_bytes": "State carried on after all tokens",
}
_SHOW = {
    "time_s": show_seconds,
    "peak_bytes": show_bytes,
    "parameter_bytes": show_bytes,
    "state_bytes": show_bytes,
}
_SIZE_INCHES = (8.0, 4.8)
_DOTS_PER_INCH = 160

# A range of times smaller than this gets numbers at 1, 2 and 5 of each decade instead of at 1.
_FEW_DECADES = 500

# Beyond this the margins of an axis are no floating-point numbers any more.
_LARGEST = 1e300


def plot(
    records: Sequence[Record],
    *,
    y: str = "time_s",
    ax: Any = None,
    bare: bool = False,
    styles: Mapping[str, Mapping[str, Any]] | None = None,
) -> Any:
    """Draw one cost of every backend against tokens; the axes that were drawn on, of several the first.

    Args:
        ax: For all of it; a figure with a panel for attention, one for the block, … is made if left out.
        bare: Without title and names, for a page that writes them around the plot.
        styles: Of lines, where other plots share them.
    """
    # Where nothing can be drawn the axes stay empty.
    panels = [] if ax is not None else [group for _, group in subjects(records, y)]
    groups: list[Sequence[Record]] = [*panels] or [records]
    styles = styles_of(groups, y) if styles is None else styles
    axes = new_axes(len(groups)) if ax is None else [ax]
    for one, group in zip(axes, groups, strict=True):
        _plot_on(one, group, y, styles, bare=bare)
    return axes[0]


def subjects(records: Sequence[Record], y: str) -> list[tuple[str, list[Record]]]:
    """The records of attention, of the block, …, as far as there is something to draw of each."""
    return [(subject, group) for subject, group in by_subject(records).items() if drawable(group, y)]


def styles_of(groups: Iterable[Sequence[Record]], y: str) -> dict[str, dict[str, Any]]:
    """The style of each line: a backend is drawn alike in all panels."""
    drawn = {curve.label: curve.backend for group in groups for curve in drawable(group, y)}
    return line_styles(list(drawn.items()))


def _plot_on(
    ax: Any, records: Sequence[Record], y: str, styles: Mapping[str, Mapping[str, Any]], *, bare: bool
) -> None:
    drawn = drawable(records, y)
    for curve in drawn:
        _draw(ax, curve, styles[curve.label])
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    _dress(ax, drawn, y)
    if not bare:
        _write_title(ax, *headline(records, y))
        name_lines(ax, drawn, styles)


def drawable(records: Sequence[Record], y: str) -> list[Curve]:
    """The curves with the points that logarithmic axes can hold; what failed stays, for its name."""
    kept = (
        curve._replace(points=tuple(point for point in curve.points if _has_logarithm(point)))
        for curve in curves(records, y)
    )
    return [curve for curve in kept if curve.measured]


def _has_logarithm(point: Point) -> bool:
    return point.value is None or (point.tokens > 0 and 0 < point.value < _LARGEST)


def headline(records: Sequence[Record], y: str) -> tuple[str, str]:
    """What a plot shows, and under which conditions."""
    drawn = drawable(records, y)
    conditions = _subtitle(drawn[0].points[0].record.case, timed=y == "time_s") if drawn else ""
    named = by_subject([curve.points[0].record for curve in drawn])
    place = f" of the {next(iter(named))}" if len(named) == 1 and "attention" not in named else ""
    return f"{_TITLES[y]}{place}", plain(conditions)


def new_axes(panels: int = 1) -> list[Any]:
    """Axes below each other on a figure of their own, without the window that pyplot would open."""
    from matplotlib.figure import Figure

    width, height = _SIZE_INCHES
    figure = Figure(figsize=(width, height * panels), layout="constrained")
    return list(figure.subplots(panels, squeeze=False)[:, 0])


def save(ax: Any, folder: Path, name: str) -> list[Path]:
    """Write the figure as PNG, SVG and PDF; the files."""
    return [
        write(folder / f"{name}.{kind}", to_bytes(ax.figure, kind, salt=name))
        for kind in ("png", "svg", "pdf")
    ]


def to_bytes(figure: Any, kind: str, *, salt: str, letters_as_paths: bool = True) -> bytes:
    """The figure as a file: undated, and with fixed names for its parts, so that equal ones are equal files.

    Args:
        salt: What the names of an SVG's parts are made from.
        letters_as_paths: Every letter of an SVG is drawn, so that it looks alike without the font.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_pdf import FigureCanvasPdf
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    figure.set_dpi(_DOTS_PER_INCH)
    _settle(figure)
    file = io.BytesIO()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    settings: Any = {"svg.hashsalt": salt, "svg.fonttype": "path" if letters_as_paths else "none"}
    canvases = {"png": FigureCanvasAgg, "pdf": FigureCanvasPdf, "svg": FigureCanvasSVG}
    with rc_context(settings):
        # `savefig` draws everything twice, at first for the layout, which is settled.
        getattr(canvases[kind](figure), f"print_{kind}")(file, metadata=undated)
    return file.getvalue()


def _settle(figure: Any) -> None:
    """Find where everything stands, once for all files: it takes as long as drawing."""
    engine = figure.get_layout_engine()
    if engine is not None:
        # The second time around it knows which ticks the axes have room for.
        engine.execute(figure)
        engine.execute(figure)
        figure.set_layout_engine("none")


def _draw(ax: Any, curve: Curve, style: Mapping[str, Any]) -> None:
    points = curve.measured
    tokens = [point.tokens for point in points]
    ax.plot(tokens, [point.value for point in points], **style, label=plain(line_name(curve)))
    # Where there is no interval the band has a gap.
    ax.fill_between(
        tokens,
        [math.nan if point.low is None else point.low for point in points],
        [math.nan if point.high is None else point.high for point in points],
        color=style["color"],
        alpha=0.18,
        linewidth=0,
    )


def _dress(ax: Any, drawn: Sequence[Curve], y: str) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    tokens = sorted({point.tokens for curve in drawn for point in curve.measured})
    ax.xaxis.set_major_locator(FixedLocator(_few(tokens)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    ax.xaxis.set_minor_locator(NullLocator())
    low, high = ax.get_ylim()
    if y != "time_s":
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_locator(LogLocator(base=2, numticks=9))
        ax.yaxis.set_minor_locator(NullLocator())
    elif high / low < _FEW_DECADES:
        ax.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _SHOW[y](value)))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.grid(axis="y", color="#e3e3e3", linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(MUTED)
    ax.tick_params(colors=INK, which="both", length=3)
    ax.set_xlabel("tokens", color=INK)


def _write_title(ax: Any, title: str, conditions: str) -> None:
    ax.set_title(f"{title}\n", loc="left", fontsize=12, fontweight="bold", color=INK)
    told = ax.text(0, 1.02, conditions, transform=ax.transAxes, fontsize=9, color=MUTED, parse_math=False)
    # However long it is, the plot keeps its size.
    told.set_in_layout(False)


def _few(tokens: Sequence[int]) -> Sequence[int]:
    """At most about ten of the lengths, the longest among them."""
    return tokens[:: -(-len(tokens) // 10) * -1][::-1] if tokens else tokens


def _subtitle(case: Case, *, timed: bool) -> str:
    """What all lines have in common."""
    passes = "forward and backward" if case.backward else "forward"
    where = f"{case.threads} CPU threads" if case.device == "cpu" else case.device
    parts = [
        f"{passes}{', causal' if case.causal else ''}",
        f"batch {case.batch}, {case.num_heads} heads of {case.head_dim}, {case.dtype}, {where}",
    ]
    return "; ".join([*parts, "median with its 95 % interval within the run"] if timed else parts)
