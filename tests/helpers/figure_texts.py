"""Texts of figures, as they are drawn."""

from itertools import combinations

from matplotlib.axes import Axes
from matplotlib.text import Text
from matplotlib.transforms import Bbox


def shown(figure):
    """Every text of a figure, or of axes, that is drawn."""
    found = figure.findobj(lambda one: isinstance(one, Text) and one.get_visible())
    cut = {id(text) for ax in figure.findobj(Axes) for text in beyond(ax)}
    return [one for one in found if one.get_text().strip() and id(one) not in cut]


def beyond(ax):
    """Texts of ticks beyond the limits, which are not drawn."""
    for axis in (ax.xaxis, ax.yaxis):
        low, high = sorted(axis.get_view_interval())
        for tick in axis.get_major_ticks():
            if not low <= tick.get_loc() <= high:
                yield from (tick.label1, tick.label2)


def texts(figure):
    """All texts, in lines that are joined again."""
    return " | ".join(one.get_text().strip().replace("\n", " ") for one in shown(figure))


def boxes(figure):
    """(text, its box in points) of every text, without arrows and without empty lines below."""
    figure.draw_without_rendering()
    found = []
    for one in shown(figure):
        box, lines = Text.get_window_extent(one), one.get_text().split("\n")
        empty = len(lines) - len(one.get_text().rstrip().split("\n"))
        below = box.height * empty / len(lines)
        edges = Bbox([[box.x0, box.y0 + below], [box.x1, box.y1]])
        found.append((one.get_text(), Bbox(edges.get_points() * 72 / figure.dpi)))
    return found


def overlaps(figure):
    """Pairs of texts that lie on each other, by more than a point."""
    known = [(text, box.padded(-0.5)) for text, box in boxes(figure)]
    return [(one, other) for (one, a), (other, b) in combinations(known, 2) if a.overlaps(b)]


def outside(figure):
    """Texts that reach beyond the figure by more than two points."""
    width, height = figure.get_size_inches() * 72
    return [
        text
        for text, box in boxes(figure)
        if box.x0 < -2 or box.y0 < -2 or box.x1 > width + 2 or box.y1 > height + 2
    ]
