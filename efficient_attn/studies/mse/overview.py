"""Errors at the largest size, all inputs side by side: the relative error, and the mean squared error."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import UNIFORM_ATTENTION, is_layer, joint_name
from efficient_attn.report.table import Table
from efficient_attn.report.text import describe, show_error
from efficient_attn.studies.mse.analysis import NAMES, Panel, panels

# Errors of one input by label and size.
_Errors = dict[tuple[str, int | None], float]


def overview_tables(records: Sequence[Record]) -> list[Table]:
    """One row for each backend, a pair of columns for each input; layers of one model are one input."""
    relative, squared = (_by_input(panels(records, quantity)) for quantity in NAMES)
    if not any(map(any, relative.values())) or not any(map(any, squared.values())):
        return []
    lines = dict.fromkeys(line for layers in relative.values() for line in _largest(layers))
    rows = tuple(
        (
            label,
            "" if size is None else str(size),
            *(_cell(group[key], (label, size)) for key in relative for group in (relative, squared)),
        )
        for label, size in lines
    )
    columns = ("backend", "size", *(head for name, *_ in relative for head in (describe(name), "MSE")))
    several = [describe(name) for (name, *_), layers in relative.items() if len(layers) > 1]
    notes = (
        "relative: ‖out − exact‖ / ‖exact‖; MSE: mean squared error of the output's entries; medians over "
        "draws.",
        *([f"{', '.join(several)}: median (range) over the layers."] if several else []),
    )
    title = "Output error, relative and mean squared (MSE), at the largest size measured"
    return [Table(title, columns, rows, notes)]


def _by_input(shown: Sequence[Panel]) -> dict[tuple[Any, ...], list[_Errors]]:
    """Errors by name and sizes of an input, the layers of one model together."""
    groups: dict[tuple[Any, ...], list[Panel]] = {}
    for panel in shown:
        name = panel.inputs.rpartition("(")[0] if is_layer(panel.inputs) else panel.inputs
        groups.setdefault((name, panel.tokens, panel.num_heads, panel.head_dim), []).append(panel)
    return {
        (joint_name([one.inputs for one in group]), *sizes): list(map(_errors, group))
        for (_, *sizes), group in groups.items()
    }


def _errors(panel: Panel) -> _Errors:
    found: _Errors = {} if panel.yardstick is None else {(UNIFORM_ATTENTION, None): panel.yardstick}
    return found | {(curve.label, one.size): one.value for curve in panel.curves for one in curve.points}


def _largest(layers: Sequence[_Errors]) -> list[tuple[str, int | None]]:
    """Each label with the largest size that every layer has; curves are in rising order of size."""
    return list(
        {label: size for label, size in layers[0] if all((label, size) in one for one in layers)}.items()
    )


def _cell(layers: Sequence[_Errors], line: tuple[str, int | None]) -> str:
    """`0.33 (0.32 to 0.52)`: the median and the range over layers; empty where one lacks the size."""
    if not all(line in one for one in layers):
        return ""
    known = [one[line] for one in layers]
    middle, low, high = (show_error(value) for value in (median(known), min(known), max(known)))
    return middle if low == high else f"{middle} ({low} to {high})"
