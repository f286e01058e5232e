"""Markers that coincide, moved or left out until each can be seen."""

from typing import Any

import numpy as np

from efficient_attn.report.escape import plain
from efficient_attn.report.figures import Chart, Series

# Marker widths by which a series is moved sideways, in the order in which they are tried; a line, whose
# form would suffer, stays near its place.
_MOVES = (0.0, 0.6, -0.6, 1.2, -1.2, 1.8, 2.4, -2.4, 3.6, 4.8, -3.6)
_MOVES_OF_A_LINE = _MOVES[:5]


def move_apart(ax: Any, chart: Chart) -> None:
    """Leave out the markers of lines that would lie on others; move single markers and bars sideways."""
    from matplotlib.transforms import ScaledTranslation

    if not chart.apart:
        return
    taken = np.empty((0, 2))
    # Short strokes mark levels, on which markers may lie.
    marked = [
        one
        for one in chart.series
        if one.style.get("marker") not in (None, "", "_") and len(one.x) and len(one.y)
    ]
    places = {one.label: ax.transData.transform(list(zip(one.x, one.y, strict=True))) for one in marked}
    places = {label: place * 72 / ax.figure.dpi for label, place in places.items()}
    artists: dict[str, list[Any]] = {line.get_label(): [line] for line in ax.lines}
    artists |= {group.get_label(): list(group.get_children()) for group in ax.containers}
    for one in (one for one in marked if _moves(one)):
        free = one.style.get("markersize", 5)
        moves = (free * widths for widths in (_MOVES if len(one.x) == 1 else _MOVES_OF_A_LINE))
        moved = {move: places[one.label] + (move, 0.0) for move in moves}
        distances = {move: _nearest(place, taken) for move, place in moved.items()}
        enough = (move for move, distance in distances.items() if distance >= free)
        move = next(enough, max(distances, key=distances.__getitem__))
        taken = np.concatenate([taken, moved[move]])
        if move:
            offset = ScaledTranslation(move / 72, 0, ax.figure.dpi_scale_trans)
            for artist in artists[plain(one.label)]:
                artist.set_transform(ax.transData + offset)
            for place in zip(one.x, one.y, strict=True):
                _point_at(ax, place, move, one.style["color"])
    lines = [one for one in marked if not _moves(one)]
    kept: dict[str, list[int]] = {one.label: [] for one in lines}
    # At every place another line comes first.
    for number in range(max((len(one.x) for one in lines), default=0)):
        for one in (*lines[number % len(lines) :], *lines[: number % len(lines)]):
            place = places[one.label][number : number + 1]
            if len(place) and _nearest(place, taken) >= one.style.get("markersize", 5) + 0.5:
                taken = np.concatenate([taken, place])
                kept[one.label].append(number)
    for one in lines:
        artists[plain(one.label)][0].set_markevery(kept[one.label])


def _point_at(ax: Any, place: tuple[float, float | None], move: float, colour: str) -> None:
    """A dot at the place of a marker that was moved, and a hairline to it."""
    line = {"arrowstyle": "-", "linewidth": 0.7, "color": colour, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", place, (move, 0), textcoords="offset points", arrowprops=line, zorder=1.95)
    ax.plot(*place, marker=".", markersize=3, color=colour, label="_", zorder=1.95)


def _moves(one: Series) -> bool:
    """Whether every marker of a series has to be seen."""
    return one.bars or len(one.x) == 1 or one.style.get("linestyle") == "none"


def _nearest(points: Any, others: Any) -> float:
    """Distance of the closest pair."""
    if not len(others):
        return float("inf")
    return float(np.sqrt(((points[:, None] - others[None]) ** 2).sum(axis=-1)).min())
