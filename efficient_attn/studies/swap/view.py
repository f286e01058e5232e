"""Models with their attention swapped: tables, sentences and the figure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np

from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.variants import MODEL, OWN, UNIFORM_ATTENTION, YARDSTICK
from efficient_attn.report.figures import MUTED, Axis, Chart, Plot, Series, line_styles
from efficient_attn.report.table import NOT_MEASURED, ORIGINAL, Table
from efficient_attn.report.text import (
    calibration_note,
    compared,
    failure_notes,
    heading,
    mark_notes,
    show_error,
    three_digits,
)
from efficient_attn.stats.candidates import missing, operations_share
from efficient_attn.stats.estimates import grouped, time_ratio
from efficient_attn.stats.noise_warnings import remedy
from efficient_attn.studies.swap.plan import (
    DISAGREEMENT,
    EVERY_TOKEN,
    FIRST_TOKEN,
    HIDDEN,
    KL,
    LOSS,
    MEAN_POOL,
    NAMES,
    OUTPUT,
    OUTPUT_COSINE,
    PERPLEXITY,
    RECALL,
)
from efficient_attn.studies.view import Environment, Plots, cost_cells

_ROW_INCHES = 0.48
# Names stand above their lines; distances are in rows.
_ABOVE_LINE = 0.4
# How far an axis reaches beyond the differences.
_MARGIN = 1.3
# More rows are in the tables.
_MOST_ROWS = 40

_DISTANCES = {**NAMES, MEAN_POOL: "1 − cosine, mean pool"}

# Quantities that decide, in order of preference.
_DECISIVE = (KL, MEAN_POOL, HIDDEN, OUTPUT)

# Rounding of float32 hidden states and outputs; errors of cosines and divergences are of the order of its
# square.
_ROUNDING = 1e-4

# Upper bound on plausible measurements.
_LARGEST = 1e100

# Fields common to the cases of one swap.
_SHARED = ("inputs", "tokens", "num_heads", "head_dim", "causal", "dtype", "device", "threads", "seed")


class Spread(NamedTuple):
    """Mean over texts and draws, and the standard deviation over draws; None for one draw."""

    mean: float
    over_seeds: float | None


class SwapRow(NamedTuple):
    """One backend.

    Attributes:
        whole: Record with all layers swapped; None if it failed or was only timed.
        alone: Records with one layer swapped, by its number.
        timed: The record of the times of one forward pass of the model.
    """

    label: str
    backend: str
    whole: Record | None
    alone: Mapping[int, Record]
    timed: Record | None
    peak_bytes: int | None
    failed: tuple[Record, ...]

    def spread(self, quantity: str) -> Spread | None:
        return None if self.whole is None else spread(self.whole, quantity)

    def by_layer(self, quantity: str) -> dict[int, float]:
        """Means of the quantity with one layer swapped, by its number."""
        spreads = {layer: spread(record, quantity) for layer, record in sorted(self.alone.items())}
        return {layer: value.mean for layer, value in spreads.items() if value is not None}


@dataclass(frozen=True, eq=False)
class Swap:
    """All measurements of one model on the same texts.

    Attributes:
        rows: The original model first, then in the order of the records.
        quantity: The deciding quantity.
    """

    case: Case
    rows: tuple[SwapRow, ...]
    quantity: str
    records: tuple[Record, ...]

    @property
    def reference(self) -> Record | None:
        """The times of the original model."""
        return next((row.timed for row in self.rows if row.backend == OWN), None)

    @cached_property
    def rounding(self) -> float:
        """Largest difference that is rounding: twice the difference of exact attention in another kernel."""
        least = _ROUNDING if self.quantity in (HIDDEN, OUTPUT) else _ROUNDING**2
        spreads = [row.spread(self.quantity) for row in self.rows if row.backend == YARDSTICK]
        return max([least, *(2 * value.mean for value in spreads if value is not None)])

    @cached_property
    def changed(self) -> list[tuple[float, SwapRow]]:
        """Rows that differ from the original model by more than rounding, the nearest first."""
        pairs = [(value.mean, row) for row in self.rows if (value := row.spread(self.quantity)) is not None]
        return sorted((pair for pair in pairs if pair[0] > self.rounding), key=lambda pair: pair[0])

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({layer for row in self.rows for layer in row.alone}))


def swaps(records: Iterable[Record]) -> tuple[Swap, ...]:
    """One per model, set of texts and setting."""
    return tuple(map(_swap, grouped((record for record in records if record.case.of == MODEL), *_SHARED)))


def spread(record: Record, quantity: str) -> Spread | None:
    """Statistics of a quantity; None if not measured or if a draw has no number."""
    draws, texts = getattr(record, f"{quantity}_draws") or (), record.texts or 1
    usable = record.status == "ok" and all(value is not None and value < _LARGEST for value in draws)
    if not usable or not draws or len(draws) % texts:
        return None
    by_seed = np.reshape(draws, (texts, -1)).mean(axis=0).tolist()
    return Spread(fmean(by_seed), stdev(by_seed) if len(by_seed) > 1 else None)


def _swap(records: Sequence[Record]) -> Swap:
    rows = sorted(map(_row, grouped(records, "label")), key=lambda row: row.backend != OWN)
    measured = [
        name for name in _DECISIVE if any(row.whole and getattr(row.whole, name) is not None for row in rows)
    ]
    return Swap(records[0].case, tuple(rows), measured[0] if measured else HIDDEN, tuple(records))


def _row(records: Sequence[Record]) -> SwapRow:
    case, ok = records[0].case, [record for record in records if record.status == "ok"]
    swapped = {record.case.layer: record for record in records if record.case.kind == "swap"}
    return SwapRow(
        label=case.label,
        backend=case.backend,
        whole=swapped.pop(None, None),
        alone={layer: record for layer, record in swapped.items() if layer is not None},
        timed=next(
            (record for record in ok if record.case.kind == "time" and any(record.times_s or ())), None
        ),
        peak_bytes=next((record.peak_bytes for record in ok if record.case.kind == "memory"), None),
        failed=tuple(record for record in records if record.status != "ok"),
    )


def tables(records: Sequence[Record], environment: Environment) -> list[Table]:
    """All layers swapped; then each layer alone, where it was measured."""
    return [table for swap in swaps(records) for table in (_whole(swap), *_alone(swap))]


def sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """The nearest backend to each model."""
    return [sentence for swap in swaps(records) if (sentence := _nearest(swap, environment))]


def show_quantity(quantity: str, value: float) -> str:
    """A distance as the cosine, a disagreement as the agreement in percent, others unchanged."""
    if quantity == PERPLEXITY:
        return three_digits(value)
    if quantity == DISAGREEMENT:
        return f"{100 * (1 - value):.1f}"
    if quantity == LOSS:
        return f"{value:+.4f}"
    if quantity == RECALL:
        return f"{100 * value:.1f}"
    if quantity in (MEAN_POOL, FIRST_TOKEN, EVERY_TOKEN, OUTPUT_COSINE):
        return f"{1 - value:.{4 if value > 1e-4 else 7}f}"
    return show_error(value)


def quantity_words(quantity: str, value: float) -> str:
    """`divergence 0.71 nats`, `cosine, mean pool 0.95`."""
    name, _, unit = NAMES[quantity].partition(", ")
    shown = show_quantity(quantity, value)
    return f"{name} {shown} {unit}" if unit in ("nats", "%") else f"{NAMES[quantity]} {shown}"


def _name(row: SwapRow) -> str:
    return ORIGINAL if row.backend == OWN else row.label


def _whole(swap: Swap) -> Table:
    wholes = [row.whole for row in swap.rows if row.whole is not None]
    measured = [name for name in NAMES if any(getattr(whole, name) is not None for whole in wholes)]
    rows = tuple(
        (
            _name(row),
            *(_cell(row, quantity) for quantity in measured),
            _operations(row.whole),
            *cost_cells(row.timed, None if row.backend == YARDSTICK else swap.reference, row.peak_bytes),
        )
        for row in swap.rows
    )
    texts = max((whole.texts or 0 for whole in wholes), default=0)
    notes = (
        f"Attention replaced in all layers without training, against the {ORIGINAL} model. Mean over "
        f"{f'{texts} text' + 's' * (texts > 1) if texts else 'draws'}. Interval: standard deviation over "
        "draws of random features. Time and memory: one "
        f"{'forward pass of the first text' if texts else 'run'}.",
        f"{UNIFORM_ATTENTION}: mean of the values. Dimmed or italic: worse than {UNIFORM_ATTENTION}.",
        *mark_notes(rows),
        *calibration_note(wholes),
        *failure_notes(swap.records),
    )
    names = [NAMES[quantity] for quantity in measured]
    columns = ("backend", *names, "operations, exact 1×", "time, ms", f"speed, {ORIGINAL} 1×", "memory, MiB")
    lower = (KL, PERPLEXITY, HIDDEN, OUTPUT)
    return Table(f"Attention replaced: {heading(swap.case)}", columns, rows, notes).compared(
        errors=[NAMES[name] for name in measured if name in lower],
        scores=[NAMES[name] for name in measured if name not in (*lower, LOSS)],
        costs=("time, ms", "memory, MiB"),
        speeds=columns[-2:-1],
    )


def _cell(row: SwapRow, quantity: str) -> str:
    """The mean and its standard deviation from draw to draw, or why there is none."""
    value = row.spread(quantity)
    if value is None:
        return next((bad.status for bad in row.failed if bad.case.kind == "swap"), NOT_MEASURED)
    shown = show_quantity(quantity, value.mean)
    if not value.over_seeds:
        return shown
    return f"{shown}\t±{(100 if quantity == DISAGREEMENT else 1) * value.over_seeds:.2g}"


def _operations(record: Record | None) -> str:
    share = None if record is None else operations_share(record)
    return NOT_MEASURED if share is None else f"{three_digits(share)}×"


def _alone(swap: Swap) -> list[Table]:
    """The decisive quantity with each layer swapped alone."""
    rows = []
    for row in swap.rows:
        if alone := row.by_layer(swap.quantity):
            shown = {layer: show_quantity(swap.quantity, value) for layer, value in alone.items()}
            rows.append((_name(row), *(shown.get(layer, NOT_MEASURED) for layer in swap.layers)))
    if not rows:
        return []
    columns = ("backend", *(f"layer, {layer}" for layer in swap.layers))
    title = f"One layer replaced, {NAMES[swap.quantity]}: {heading(swap.case)}"
    return [Table(title, columns, tuple(rows), ("All other layers are exact.",))]


def _nearest(swap: Swap, environment: Environment) -> str:
    near = [(mean, row) for mean, row in swap.changed if row.backend not in (OWN, UNIFORM_ATTENTION)]
    left = missing(environment, {row.label for row in swap.rows if row.whole is not None or row.failed})
    if not near:
        return left.strip()
    value, row = near[0]
    plainest = next((mean for mean, row in swap.changed if row.backend == UNIFORM_ATTENTION), float("inf"))
    worse = [row.label for mean, row in near if mean >= plainest]
    no_better = f" No better than uniform attention: {', '.join(worse)}." if worse else ""
    speed, settled = "", ""
    if row.timed is not None and swap.reference is not None:
        ratio = time_ratio(row.timed, swap.reference)
        speed, settled = f", {compared(ratio)}", "" if ratio.side_of_one else f" {remedy(environment)}"
    return (
        f"{swap.case.inputs} at {swap.case.tokens} tokens is changed least by {row.label}"
        f"{' among the candidates measured so far' if left else ''}: "
        f"{quantity_words(swap.quantity, value)}{speed}.{settled}{no_better}{left}"
    )


def plots(records: Sequence[Record], environment: Environment) -> Plots:
    """Two charts for each model, one below the other."""
    models = swaps(records)
    if not models:
        return {}
    several = len(models) > 1
    charts = [chart for swap in models for chart in _charts(swap, heading(swap.case) if several else "")]
    plot = Plot(
        "Output change after replacing attention",
        f"{'' if several else heading(models[0].case)}\n"
        "no training; crosses: uniform attention; differences at rounding level are not drawn",
        tuple((chart,) for chart in charts),
        legend=False,
    )
    return {"swap": plot}


def _charts(swap: Swap, head: str) -> list[Chart]:
    rows = swap.changed[:_MOST_ROWS]
    styles = line_styles([(row.label, row.backend) for _, row in rows if row.backend != UNIFORM_ATTENTION])
    cross = {"color": MUTED, "marker": "x", "linestyle": (0, (1, 2)), "linewidth": 1.2, "markersize": 6}
    styles[UNIFORM_ATTENTION] = cross
    alone = [
        Series(row.label, list(line), list(line.values()), styles[row.label])
        for _, row in rows
        if (line := row.by_layer(swap.quantity))
    ]
    layers = Axis("replaced layer (all others exact)", show="{:.0f}".format, ticks=swap.layers)
    second = [Chart(layers, Axis(_DISTANCES[swap.quantity], "log"), tuple(alone))] if swap.layers else []
    return [_end_to_end(swap, styles)._replace(title=head), *second]


def _end_to_end(swap: Swap, styles: dict[str, dict[str, Any]]) -> Chart:
    """One line for each backend up to its mean."""
    rows = swap.changed[:_MOST_ROWS]
    limits = (rows[0][0] / _MARGIN, rows[-1][0] * _MARGIN) if rows else None
    series, names = [], {}
    for height, (mean, row) in enumerate(rows):
        # The line style of a name is the one of the other chart.
        style, start = styles[row.label], limits[0] if limits else mean
        series += [
            Series("", (start, mean), (height, height), {**style, "marker": ""}),
            Series("", (mean,), (height,), {**style, "linestyle": "none", "markersize": 8, "clip_on": False}),
        ]
        names[height - _ABOVE_LINE] = row.label
    x = Axis(f"{_DISTANCES[swap.quantity]}, all layers replaced", "log", limits=limits)
    y = Axis(ticks=names, limits=(len(rows) - 0.4, -0.9), inside=True)
    return Chart(x, y, tuple(series), height=_ROW_INCHES * len(rows))
