"""Errors at the largest size, all inputs side by side: the relative error, and the mean squared error."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from efficient_attn.report.error_table import describe, show_error
from efficient_attn.report.table import Table
from efficient_attn.runner.layers import is_layer, joint_name
from efficient_attn.runner.records import Record
from efficient_attn.runner.sizes import MEAN_OF_VALUES
from efficient_attn.studies.mse.analysis import Panel, panels

# Errors of one input by label and size.
_Errors = dict[str, dict[int | None, float]]

_QUANTITIES = ("output_relative_error", "output_mse")


def overview_tables(records: Sequence[Record]) -> list[Table]:
    """One row for each backend, a pair of columns for each input; layers of one model are one input."""
    relative, squared = (_by_input(panels(records, quantity)) for quantity in _QUANTITIES)
    if not any(map(any, relative.values())) or not any(map(any, squared.values())):
        return []
    lines = dict.fromkeys(line for layers in relative.values() for line in _largest(layers))
    rows = tuple(
        (
            label,
            "" if size is None else str(size),
            *(_cell(group[key], label, size) for key in relative for group in (relative, squared)),
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
    """Errors by name and sizes of an input, those of the layers of one model together."""
    groups: dict[tuple[Any, ...], list[Panel]] = {}
    for panel in shown:
        name = panel.inputs.rpartition("(")[0] if is_layer(panel.inputs) else panel.inputs
        groups.setdefault((name, panel.tokens, panel.num_heads, panel.head_dim), []).append(panel)
    return {
        (joint_name([one.inputs for one in group]), *sizes): list(map(_errors, group))
        for (_, *sizes), group in groups.items()
    }


def _errors(panel: Panel) -> _Errors:
    found: _Errors = {} if panel.yardstick is None else {MEAN_OF_VALUES: {None: panel.yardstick}}
    return found | {curve.label: {one.size: one.value for one in curve.points} for curve in panel.curves}


def _largest(layers: Sequence[_Errors]) -> list[tuple[str, int | None]]:
    """Each label with the largest size that every layer has."""
    found = []
    for label in dict.fromkeys(label for errors in layers for label in errors):
        common = set.intersection(*(set(errors.get(label, ())) for errors in layers))
        if common:
            found.append((label, max(common, key=lambda size: size or 0)))
    return found


def _cell(layers: Sequence[_Errors], label: str, size: int | None) -> str:
    """`0.33 (0.32 to 0.52)`: the median and the range over layers; empty where one lacks the size."""
    known = [value for one in layers if (value := one.get(label, {}).get(size)) is not None]
    if len(known) < len(layers):
        return ""
    middle, low, high = (show_error(value) for value in (median(known), min(known), max(known)))
    return middle if low == high else f"{middle} ({low} to {high})"
