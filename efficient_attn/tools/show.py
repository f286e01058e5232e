"""Attention weights that backends imply on a text, as heat maps with the words on the axes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from efficient_attn.contained import contained, described
from efficient_attn.errors import OptionError, ShapeError
from efficient_attn.measure.accuracy import draw_backend, try_options
from efficient_attn.measure.error import outputs_checked, relative_error
from efficient_attn.measure.inputs import SHIPPED, read_activations, shipped, subjects
from efficient_attn.measure.variants import YARDSTICK, Variant, select
from efficient_attn.report.drawing import draw
from efficient_attn.report.figures import Axis, Chart, Plot, in_rows
from efficient_attn.report.table import Table, short, to_html
from efficient_attn.report.text import describe, show_error

# One backend of each kind: another estimate of the same kind would be the same picture twice.
_BACKENDS = ("exact", "window-clusters", "window", "linformer", "performer-full", "performer-positive")

# The sharpest of the shipped layers.
_LAYER = 1

_LONGEST_WORD, _HEIGHT_INCHES = 14, 3.2
_COLOURS = ("#a3123a", "#e8879c", "#ffffff", "#5a9bd4", "#08306b")
_SCALE = "each row shows the weights of one query: white 0, dark blue 1, red negative"


class WeightsMap(NamedTuple):
    """The weights of one backend in one head, [queries keys], and the error of its output."""

    label: str
    weights: NDArray[np.floating]
    error: float


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Heat maps, exact attention first, and notes on backends that could not be shown."""

    maps: tuple[WeightsMap, ...]
    words: tuple[str, ...]
    title: str
    notes: tuple[str, ...] = ()

    def plot(self) -> Any:
        """The figure: a chart for each backend, all in one scale of colours."""
        charts = [_chart(weights_map, self.words) for weights_map in self.maps]
        return draw(Plot(self.title, _SCALE, in_rows(charts)))[0].figure

    def table(self) -> Table:
        """The numbers below the titles of the charts."""
        rows = tuple((weights_map.label, show_error(weights_map.error)) for weights_map in self.maps)
        return Table(self.title, ("backend", "output error"), rows, self.notes)

    def _repr_html_(self) -> str:
        return to_html(self.table())


def show(
    backends: Sequence[Any] | None = None,
    *,
    inputs: str | Path = "encoder",
    layer: int | None = None,
    head: int = 6,
    tokens: str = "0:24",
    options: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    seed: int = 0,
) -> Shown:
    """The attention weights of one head, for exact attention and for backends. `.plot()` draws them.

    Every backend reads all tokens of the inputs; some of them stand on the axes.

    Args:
        backends: Names, `file.py:object`, modules or functions f(q, k, v); None stands for one of each kind.
        inputs: `encoder` or `decoder` (shipped), or a safetensors file.
        layer: None: layer 1 of the encoder, the first layer of other inputs.
        tokens: Tokens on the axes, `0:24` for the first 24.
        options: {backend: {option: values}}; every combination is a variant.
        seed: Random seed of the backends.
    """
    chosen = select(_BACKENDS if backends is None else backends, options)
    exact = [variant for variant in chosen if variant.backend == YARDSTICK] or select([YARDSTICK])
    chosen = (*exact, *(variant for variant in chosen if variant.backend != YARDSTICK))
    if inputs == "gaussian":
        raise OptionError("inputs are encoder, decoder or a safetensors file; Gaussian draws have no words.")
    layer = _LAYER if layer is None and inputs == "encoder" else layer
    subject = subjects([inputs], layers=None if layer is None else [layer], seed=seed)[0]
    heads = subject.activations.q.shape[1]
    if not 0 <= head < heads:
        raise OptionError(f"head is from 0 to {heads - 1}, not {head}.")
    first, _, last = tokens.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last) <= subject.tokens):
        raise OptionError(f"tokens are a range within 0:{subject.tokens}, such as 0:24, not {tokens!r}.")
    span = slice(int(first), int(last))
    for variant in chosen:
        try_options(variant, subject)
    maps, notes = [], []
    for variant in chosen:
        try:
            with contained():
                maps.append(_map(variant, subject, head, span))
        except Exception as failure:  # The backend may be anybody's code: whatever it raises is its result.
            notes.append(f"{variant.label}: {described(failure)}")
    words = _words(inputs, subject.tokens)[span]
    title = f"Attention weights: {describe(subject.name)}, head {head}; {subject.tokens} keys"
    return Shown(maps=tuple(maps), words=words, title=title, notes=tuple(notes))


def _words(inputs: str | Path, tokens: int) -> tuple[str, ...]:
    if inputs in SHIPPED:
        return shipped(SHIPPED[str(inputs)]).tokens[:tokens]
    strings = read_activations(inputs).tokens
    return strings if len(strings) == tokens else tuple(map(str, range(tokens)))


def _map(variant: Variant, subject: Any, head: int, span: slice) -> WeightsMap:
    q, k, v = subject.activations
    with torch.no_grad():
        backend = draw_backend(variant, subject, subject.seed)
        with outputs_checked(backend):
            error = relative_error(backend(q, k, v)[:, head], subject.exact[:, head])
        # Weights are outputs for unit vectors; the keys on the axis need few of them.
        unit = torch.eye(subject.tokens)[:, span].expand(*k.shape[:3], -1)
        weights = backend(q, k, unit)[0, head, span]
    if weights.shape != (unit.shape[-1],) * 2:
        raise ShapeError(f"output {list(weights.shape)} is not as wide as the values, {unit.shape[-1]}.")
    return WeightsMap(variant.label, weights.numpy(), error)


def _chart(weights_map: WeightsMap, words: Sequence[str]) -> Chart:
    ticks = {float(number): short(word, _LONGEST_WORD) for number, word in enumerate(words)}
    notes = (f"output error {show_error(weights_map.error)}",)
    x, y = Axis("key", ticks=ticks), Axis("query", ticks=ticks)
    return Chart(
        x, y, title=weights_map.label, notes=notes, height=_HEIGHT_INCHES, draw=partial(_draw, weights_map)
    )


def _draw(weights_map: WeightsMap, ax: Any) -> None:
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    # Equal steps of colour are equal steps of the root: most weights are small.
    roots = np.sign(weights_map.weights) * np.sqrt(np.abs(weights_map.weights))
    colours = LinearSegmentedColormap.from_list("weights", _COLOURS)
    ax.imshow(roots, cmap=colours, norm=Normalize(-1, 1), interpolation="nearest", aspect="auto")
    ax.tick_params(length=0, pad=2)
    ax.grid(visible=False)
