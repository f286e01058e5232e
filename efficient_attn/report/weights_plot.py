"""Attention weights as heat maps, with the words on the axes."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from efficient_attn.report.error_table import show_error
from efficient_attn.report.harmless import plain
from efficient_attn.report.palette import INK, MUTED
from efficient_attn.report.readable import short

# Panels beside each other, and inches of a cell, of what words take beside a panel, and of a title.
_COLUMNS = 3
_CELL_INCHES, _WORD_INCHES, _TITLE_INCHES, _HEAD_INCHES = 0.14, 0.8, 0.5, 0.7

_LONGEST_NAME, _LONGEST_WORD = 40, 14

# The titles of a panel need so much, however few words it shows.
_LEAST_INCHES = 2.2

# White is no weight, dark blue the whole row; weights below zero are red.
_COLOURS = ("#a3123a", "#e8879c", "#ffffff", "#5a9bd4", "#08306b")
_TICKS = (-1.0, -0.25, 0.0, 0.05, 0.25, 0.5, 1.0)


class WeightsMap(NamedTuple):
    """The weights of one backend in one head.

    Attributes:
        weights: Of the queries and keys on the axes, [queries keys].
        elsewhere: What each of these queries gives to all keys that are not on the axis together.
        error: Of the output of this head, relative to exact attention.
        entropy: Of the rows, their mean in nats; None where a weight is below zero.
        lowest: The smallest weight of all.
    """

    label: str
    weights: NDArray[np.floating]
    elsewhere: NDArray[np.floating]
    error: float
    entropy: float | None
    lowest: float


def plot_weights(
    maps: Sequence[WeightsMap], words: Sequence[str], *, title: str, keys: int, more: str = "all others"
) -> Any:
    """A panel for each backend, all in one scale of colours; the figure.

    Args:
        words: On both axes.
        keys: How many keys a query reads in all.
        more: What the column beside the words is called.
    """
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(maps))
    rows = -(-len(maps) // columns)
    side = max(_CELL_INCHES * len(words), _LEAST_INCHES)
    size = (
        columns * (side + 0.35) + 2 * _WORD_INCHES + 0.5,
        rows * (side + _TITLE_INCHES) + _WORD_INCHES + _HEAD_INCHES,
    )
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for number, ax in enumerate(grid.flat):
        if number >= len(maps):
            ax.set_axis_off()
            continue
        image = _draw(ax, maps[number], keys)
        last = number + columns >= len(maps)
        _name(ax, words, more, left=number % columns == 0, bottom=last)
    # A name that somebody chose is no mathematics.
    told = f"{plain(title)}\na row: how a query weighs the keys; its last cell: all keys that are not shown\n"
    figure.suptitle(told, fontsize=11, color=INK, parse_math=False)
    bar = figure.colorbar(image, ax=grid, fraction=0.02, pad=0.01, aspect=40)
    # Red is explained where there is red.
    lowest = -1.0 if any(one.entropy is None for one in maps) else 0.0
    bar.ax.set_ylim(lowest, 1.0)
    shown = [tick for tick in _TICKS if lowest <= tick]
    bar.set_ticks([_root(tick) for tick in shown], labels=[f"{tick:g}" for tick in shown])
    bar.ax.tick_params(labelsize=8, colors=INK)
    bar.set_label("weight of a key", fontsize=9, color=INK)
    bar.outline.set_visible(False)
    return figure


def _draw(ax: Any, one: WeightsMap, keys: int) -> Any:
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    gap = np.full((len(one.weights), 1), np.nan)
    shown = np.concatenate([one.weights, gap, one.elsewhere[:, None]], axis=1)
    # Equal steps of colour are equal steps of the root: most weights are small.
    roots = np.sign(shown) * np.sqrt(np.abs(shown))
    colours = LinearSegmentedColormap.from_list("weights", _COLOURS)
    image = ax.imshow(roots, cmap=colours, norm=Normalize(-1, 1), interpolation="nearest", aspect="equal")
    told = f"error {show_error(one.error)}, {_entropy(one, keys)}"
    name = short(plain(one.label), _LONGEST_NAME)
    ax.set_title(name, loc="left", fontsize=10, fontweight="bold", color=INK, pad=16, parse_math=False)
    ax.text(0, 1.02, told, transform=ax.transAxes, fontsize=8, color=MUTED, va="bottom")
    return image


def _entropy(one: WeightsMap, keys: int) -> str:
    if one.entropy is None:
        return f"weights down to {show_error(one.lowest) if one.lowest > -10 else f'{one.lowest:.0f}'}"
    return f"entropy {one.entropy:.1f} of {math.log(keys):.1f} nats"


def _name(ax: Any, words: Sequence[str], more: str, *, left: bool, bottom: bool) -> None:
    """Queries at the left, keys below."""
    shown = [short(plain(word), _LONGEST_WORD) for word in words]
    ax.set_yticks(range(len(words)), shown if left else [])
    ax.set_xticks([*range(len(words)), len(words) + 1], [*shown, more] if bottom else [])
    ax.tick_params(length=0, labelsize=6.5, colors=INK, pad=2)
    for label in [*ax.get_xticklabels(), *ax.get_yticklabels()]:
        label.set_parse_math(False)
    for label in ax.get_xticklabels():
        label.set_rotation(90)
    if left:
        ax.set_ylabel("query", fontsize=8, color=MUTED)
    if bottom:
        ax.set_xlabel("key", fontsize=8, color=MUTED)
    for side in ax.spines.values():
        side.set_color(MUTED)
        side.set_linewidth(0.5)


def _root(weight: float) -> float:
    return math.copysign(math.sqrt(abs(weight)), weight)
