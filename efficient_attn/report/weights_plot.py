"""Attention weights as heat maps, with the words on the axes."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from efficient_attn.report.error_table import show_error
from efficient_attn.report.escape import short
from efficient_attn.report.figures import Axis, Chart, Plot, in_rows
from efficient_attn.report.palette import MUTED

_LONGEST_WORD = 14
# Height of a chart with its words below it.
_HEIGHT_INCHES = 3.2

# White is no weight, dark blue the whole row; weights below zero are red.
_COLOURS = ("#a3123a", "#e8879c", "#ffffff", "#5a9bd4", "#08306b")
_TICKS = (-1.0, -0.25, 0.0, 0.05, 0.25, 0.5, 1.0)


class WeightsMap(NamedTuple):
    """The weights of one backend in one head.

    Attributes:
        weights: Weights of the queries and keys on the axes, [queries keys].
        elsewhere: Sum of the weights of all keys that are not on the axis, for each of these queries.
        error: Relative error of the output of this head.
        entropy: Mean attention entropy of the rows, nats; None if a weight is below zero.
        lowest: The smallest weight of all.
    """

    label: str
    weights: NDArray[np.floating]
    elsewhere: NDArray[np.floating]
    error: float
    entropy: float | None
    lowest: float


def weights_plot(
    maps: Sequence[WeightsMap], words: Sequence[str], *, title: str, keys: int, more: str = "all others"
) -> Plot:
    """A chart for each backend, all in one scale of colours.

    Args:
        words: On both axes.
        keys: Number of keys that a query reads.
        more: Name of the column of the other keys.
    """
    charts = [_chart(one, words, more, keys) for one in maps]
    # Red is explained where there is red.
    signed = any(one.entropy is None for one in maps)
    conditions = "a row: weights of one query; its last cell: all keys that are not shown"
    return Plot(title, conditions, in_rows(charts), (), finish=partial(_colours, signed))


def _chart(one: WeightsMap, words: Sequence[str], more: str, keys: int) -> Chart:
    names = {float(number): short(word, _LONGEST_WORD) for number, word in enumerate(words)}
    return Chart(
        Axis("key", ticks=names | {len(words) + 1.0: more}),
        Axis("query", ticks=names),
        title=one.label,
        notes=(f"error {show_error(one.error)}", _entropy(one, keys)),
        height=_HEIGHT_INCHES,
        draw=partial(_draw, one),
    )


def _draw(one: WeightsMap, ax: Any) -> None:
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    gap = np.full((len(one.weights), 1), np.nan)
    shown = np.concatenate([one.weights, gap, one.elsewhere[:, None]], axis=1)
    # Equal steps of colour are equal steps of the root: most weights are small.
    roots = np.sign(shown) * np.sqrt(np.abs(shown))
    colours = LinearSegmentedColormap.from_list("weights", _COLOURS)
    ax.imshow(roots, cmap=colours, norm=Normalize(-1, 1), interpolation="nearest", aspect="auto")
    ax.tick_params(length=0, pad=2)
    ax.grid(visible=False)
    for side in ax.spines.values():
        side.set(visible=True, color=MUTED, linewidth=0.5)


def _colours(signed: bool, axes: Sequence[Any]) -> None:
    """The scale of colours, below all charts."""
    if not axes:
        return
    lowest = -1.0 if signed else 0.0
    figure = axes[0].figure
    bar = figure.colorbar(axes[0].images[0], ax=axes, location="bottom", fraction=0.02, pad=0.01, aspect=40)
    bar.ax.set_xlim(lowest, 1.0)
    ticks = [tick for tick in _TICKS if lowest <= tick]
    bar.set_ticks([_root(tick) for tick in ticks], labels=[f"{tick:g}" for tick in ticks])
    bar.set_label("weight of a key")
    bar.outline.set_visible(False)


def _entropy(one: WeightsMap, keys: int) -> str:
    if one.entropy is None:
        return f"weights down to {show_error(one.lowest) if one.lowest > -10 else f'{one.lowest:.0f}'}"
    return f"attention entropy {one.entropy:.1f} of {math.log(keys):.1f} nats"


def _root(weight: float) -> float:
    return math.copysign(math.sqrt(abs(weight)), weight)
