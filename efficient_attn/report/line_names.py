"""Names beside the ends of lines, in the place of a legend."""

from collections.abc import Mapping, Sequence
from typing import Any

from efficient_attn.analysis.curves import YARDSTICK, Curve
from efficient_attn.report.harmless import plain
from efficient_attn.report.readable import short

_LONGEST_NAME = 36

# Least distance of two names, as a share of the axis's height.
_NAME_DISTANCE = 0.055


def name_lines(ax: Any, drawn: Sequence[Curve], styles: Mapping[str, Mapping[str, Any]]) -> None:
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
            plain(line_name(curve)),
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
                # It begins at the name's edge: to cut off what lies within the name would take long.
                "patchA": None,
                "shrinkA": 3,
                "shrinkB": 4,
            },
        )


def line_name(curve: Curve) -> str:
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
