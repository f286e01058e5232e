"""Time and memory against tokens, on logarithmic axes, each line named where it ends."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from efficient_attn.analysis.curves import YARDSTICK, Curve, Point, curves
from efficient_attn.report.files import write
from efficient_attn.report.harmless import plain
from efficient_attn.report.palette import INK, MUTED, line_styles
from efficient_attn.report.readable import short
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

_LONGEST_NAME = 36

# Beyond this the margins of an axis are no floating-point numbers any more.
_LARGEST = 1e300

# Least distance of two names, as a share of the axis's height.
_NAME_DISTANCE = 0.055


def plot(records: Sequence[Record], *, y: str = "time_s", ax: Any = None, bare: bool = False) -> Any:
    """Draw one cost of every backend against tokens; the axes that were drawn on.

    Args:
        bare: Without title and names, for a page that writes them around the plot.
    """
    drawn = drawable(records, y)
    ax = new_axes() if ax is None else ax
    styles = line_styles([(curve.label, curve.backend) for curve in drawn])
    for curve in drawn:
        _draw(ax, curve, styles[curve.label])
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    _dress(ax, drawn, y)
    if not bare:
        _write_title(ax, *headline(records, y))
        _name_lines(ax, drawn, styles)
    return ax


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
    return _TITLES[y], plain(conditions)


def new_axes() -> Any:
    """Axes on a figure of their own, without the window that pyplot would open."""
    from matplotlib.figure import Figure

    return Figure(figsize=_SIZE_INCHES, layout="constrained").subplots()


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

    file = io.BytesIO()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    settings: Any = {"svg.hashsalt": salt, "svg.fonttype": "path" if letters_as_paths else "none"}
    with rc_context(settings):
        figure.savefig(file, format=kind, dpi=_DOTS_PER_INCH, metadata=undated)
    return file.getvalue()


def _draw(ax: Any, curve: Curve, style: Mapping[str, Any]) -> None:
    points = curve.measured
    tokens = [point.tokens for point in points]
    ax.plot(tokens, [point.value for point in points], **style, label=plain(_name(curve)))
    ax.fill_between(
        tokens,
        [point.low for point in points],
        [point.high for point in points],
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
    return "; ".join([*parts, "median with its 95 % interval"] if timed else parts)


def _name_lines(ax: Any, drawn: Sequence[Curve], styles: Mapping[str, Mapping[str, Any]]) -> None:
    """Write each name beside the end of its line, moved up or down where names would overlap."""
    if not drawn:
        return
    low, high = (float(edge) for edge in ax.transScale.transform([(1, edge) for edge in ax.get_ylim()])[:, 1])
    longest = max(curve.measured[-1].tokens for curve in drawn)
    ends = []
    for curve in drawn:
        value = ax.transScale.transform((1, curve.measured[-1].value))[1]
        ends.append(((value - low) / (high - low), curve))
    ends.sort(key=lambda end: end[0])
    for height, (own, curve) in zip(_spread([end[0] for end in ends]), ends, strict=True):
        colour = styles[curve.label]["color"]
        x = curve.measured[-1].tokens
        ax.annotate(
            plain(_name(curve)),
            xy=(x, curve.measured[-1].value),
            xytext=(1.02, height),
            textcoords="axes fraction",
            color=colour,
            fontsize=9.5,
            fontweight="bold" if curve.backend == YARDSTICK else "normal",
            va="center",
            annotation_clip=False,
            parse_math=False,
            arrowprops={
                "arrowstyle": "-",
                # From the middle of the name's left edge.
                "relpos": (0, 0.5),
                "color": colour,
                "linewidth": 0.7,
                "alpha": 0.6 if abs(height - own) > 0.01 or x < longest else 0.0,
                "shrinkA": 1,
                "shrinkB": 4,
            },
        )


def _name(curve: Curve) -> str:
    """The label, shortened if it would take the plot's place, and where it could not be measured."""
    label = short(curve.label, _LONGEST_NAME)
    missing = [point for point in curve.points if point.value is None]
    return f"{label} ({missing[0].record.status} at {missing[0].tokens})" if missing else label


def _spread(heights: Sequence[float]) -> list[float]:
    """Rising heights moved apart to a readable distance, as little as possible, kept around the axis."""
    placed = list(heights)
    # Overlapping neighbours share the move; a few passes settle the few lines that a plot has.
    for _ in range(20 * len(placed)):
        for below in range(len(placed) - 1):
            lack = _NAME_DISTANCE - (placed[below + 1] - placed[below])
            if lack > 0:
                placed[below] -= lack / 2
                placed[below + 1] += lack / 2
    return placed
