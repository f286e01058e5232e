"""Models with their attention swapped: tables, sentences and the figure."""

from collections.abc import Sequence
from typing import Any

from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import OWN, UNIFORM_ATTENTION, YARDSTICK
from efficient_attn.report.figures import MUTED, Axis, Chart, Plot, Series, line_styles
from efficient_attn.report.table import Table
from efficient_attn.report.text import (
    calibration_note,
    failure_notes,
    heading,
    show_error,
    show_ratio,
    three_digits,
)
from efficient_attn.stats.candidates import missing, operations_sentence, operations_share
from efficient_attn.stats.estimates import time_ratio
from efficient_attn.studies.swap.analysis import (
    DISAGREEMENT,
    EVERY_TOKEN,
    FIRST_TOKEN,
    LOSS,
    MEAN_POOL,
    NAMES,
    OUTPUT_COSINE,
    PERPLEXITY,
    RECALL,
    Swap,
    SwapRow,
    swaps,
)
from efficient_attn.studies.view import NOT_MEASURED, Environment, Plots, cost_cells

_ROW_INCHES = 0.48
# Names stand above their lines; distances are in rows.
_ABOVE_LINE = 0.4
# How far an axis reaches beyond the differences.
_MARGIN = 1.3
# More rows are in the tables.
_MOST_ROWS = 40

_DISTANCES = {**NAMES, MEAN_POOL: "1 − cosine, mean pool"}


def plots(records: Sequence[Record], environment: Environment) -> Plots:
    """The only plot."""
    return {"swap": swap_plot(records)} if records else {}


def tables(records: Sequence[Record], environment: Environment) -> list[Table]:
    """All layers swapped; then each layer alone, where it was measured."""
    return [table for swap in swaps(records) for table in (_whole(swap), *_alone(swap))]


def sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """The nearest backend to each model, and backends that save no operations."""
    texts = []
    for swap in swaps(records):
        texts += [_nearest(swap, environment), operations_sentence(swap.records)]
    return [sentence for sentence in texts if sentence]


def show_quantity(quantity: str, value: float) -> str:
    """A distance as the cosine, a disagreement as the share of agreement, other quantities unchanged."""
    if quantity == PERPLEXITY:
        return three_digits(value)
    if quantity == DISAGREEMENT:
        return f"{100 * (1 - value):.1f} %"
    if quantity == LOSS:
        return f"{value:+.4f}"
    if quantity == RECALL:
        return f"{100 * value:.1f} %"
    if quantity in (MEAN_POOL, FIRST_TOKEN, EVERY_TOKEN, OUTPUT_COSINE):
        return f"{1 - value:.{4 if value > 1e-4 else 7}f}"
    return show_error(value)


def _whole(swap: Swap) -> Table:
    wholes = [row.whole for row in swap.rows if row.whole is not None]
    measured = [name for name in NAMES if any(getattr(whole, name) is not None for whole in wholes)]
    rows = tuple(
        (
            row.label,
            *(_cell(row, quantity) for quantity in measured),
            _operations(row.whole),
            *cost_cells(row.timed, None if row.backend == YARDSTICK else swap.reference, row.peak_bytes),
        )
        for row in swap.rows
    )
    texts = max((whole.texts or 0 for whole in wholes), default=0)
    notes = (
        "Against the same model with its own attention, all layers swapped, nothing trained afterwards. "
        f"Means over {f'{texts} texts' if texts else 'draws'}; ±: standard deviation over draws of random "
        f"features. Time and memory: one {'forward pass of the first text' if texts else 'run'}.",
        f"{UNIFORM_ATTENTION}: every query gets the same output, without any attention.",
        f"{YARDSTICK} is the same attention as the model's own: a difference of their times is noise or the "
        "kernel, and no speed is printed.",
        *calibration_note(wholes),
        *failure_notes(swap.records),
    )
    names = (NAMES[quantity] for quantity in measured)
    columns = ("backend", *names, "operations, exact = 1", "time, ms", "speed, own = 1", "peak memory, MiB")
    return Table(f"Attention swapped: {heading(swap.case)}", columns, rows, notes)


def _cell(row: SwapRow, quantity: str) -> str:
    """The mean and its standard deviation from draw to draw, or why there is none."""
    value = row.spread(quantity)
    if value is None:
        return next((bad.status for bad in row.failed if bad.case.kind == "swap"), NOT_MEASURED)
    shown = show_quantity(quantity, value.mean)
    if not value.over_seeds:
        return shown
    return f"{shown} ±{(100 if quantity == DISAGREEMENT else 1) * value.over_seeds:.2g}"


def _operations(record: Record | None) -> str:
    share = None if record is None else operations_share(record)
    return NOT_MEASURED if share is None else f"{share:.3g}"


def _alone(swap: Swap) -> list[Table]:
    """The decisive quantity with each layer swapped alone."""
    rows = []
    for row in swap.rows:
        if alone := row.by_layer(swap.quantity):
            shown = {layer: show_quantity(swap.quantity, value) for layer, value in alone.items()}
            rows.append((row.label, *(shown.get(layer, NOT_MEASURED) for layer in swap.layers)))
    if not rows:
        return []
    columns = ("backend", *(f"layer {layer}" for layer in swap.layers))
    title = f"One layer swapped, {NAMES[swap.quantity]}: {heading(swap.case)}"
    return [Table(title, columns, tuple(rows), ("The other layers keep the model's own attention.",))]


def _nearest(swap: Swap, environment: Environment) -> str:
    near = [(mean, row) for mean, row in swap.changed if row.backend not in (OWN, UNIFORM_ATTENTION)]
    left = missing(environment, {row.label for row in swap.rows if row.whole is not None or row.failed})
    if not near:
        return left.strip()
    value, row = near[0]
    plainest = next((mean for mean, row in swap.changed if row.backend == UNIFORM_ATTENTION), float("inf"))
    worse = [row.label for mean, row in near if mean >= plainest]
    no_nearer = f" No nearer than uniform attention: {', '.join(worse)}." if worse else ""
    return (
        f"With all its attention swapped, {swap.case.inputs} stays nearest to itself with {row.label}"
        f"{' among the candidates measured so far' if left else ''}: {NAMES[swap.quantity]} "
        f"{show_quantity(swap.quantity, value)}{_speed(swap, row)}.{no_nearer}{left}"
    )


def _speed(swap: Swap, row: SwapRow) -> str:
    """The speed-up of the model, with a remark where its interval holds 1."""
    if row.timed is None or swap.reference is None:
        return ""
    ratio = time_ratio(row.timed, swap.reference)
    unclear = "" if ratio.side_of_one else ", which leaves open whether it is faster"
    return f", {show_ratio(ratio)} as fast as before{unclear}"


def swap_plot(records: Sequence[Record]) -> Plot:
    """Two charts for each model, one below the other."""
    models = swaps(records)
    charts = [
        chart for swap in models for chart in _charts(swap, heading(swap.case) if len(models) > 1 else "")
    ]
    return Plot(
        "Distance of a converted model from itself",
        f"{heading(models[0].case) if len(models) == 1 else ''}\n"
        "training-free conversion; crosses: uniform attention (mean of the values); backends that "
        "differ by rounding are left out",
        tuple((chart,) for chart in charts),
        legend=False,
    )


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
    layers = Axis("the only layer replaced", show="{:.0f}".format, ticks=swap.layers)
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
