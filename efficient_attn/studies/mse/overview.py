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

# By name and sizes of an input: its panels, one for each layer.
_Groups = dict[tuple[Any, ...], list[Panel]]

_QUANTITIES = ("output_relative_error", "output_mse")


def overview_tables(records: Sequence[Record]) -> list[Table]:
    """One row for each backend, a pair of columns for each input; layers of one model are one input."""
    groups = [_grouped(panels(records, quantity)) for quantity in _QUANTITIES]
    relative, squared = groups
    if not relative or not _measured(relative) or not _measured(squared):
        return []
    lines: dict[tuple[str, int | None], None] = {}
    for group in relative.values():
        for label, size in _lines(group):
            lines.setdefault((label, size))
    columns = ["backend", "size"]
    for name, *_ in relative:
        columns += [describe(name), "MSE"]
    rows = tuple(
        (
            label,
            "" if size is None else str(size),
            *(_cell(group[key], label, size) for key in relative for group in (relative, squared)),
        )
        for label, size in lines
    )
    several = [name for (name, *_), group in relative.items() if len(group) > 1]
    notes = [
        "relative: ‖out − exact‖ / ‖exact‖; MSE: mean squared error of the output's entries; medians over "
        "draws."
    ]
    if several:
        notes.append(f"{', '.join(map(describe, several))}: median (range) over the layers.")
    title = "Output error, relative and mean squared (MSE), at the largest size measured"
    return [Table(title, tuple(columns), rows, tuple(notes))]


def _grouped(shown: Sequence[Panel]) -> _Groups:
    """Panels by input, those of the layers of one model together."""
    groups: _Groups = {}
    for panel in shown:
        name = panel.inputs.rpartition("(")[0] if is_layer(panel.inputs) else panel.inputs
        groups.setdefault((name, panel.tokens, panel.num_heads, panel.head_dim), []).append(panel)
    return {
        (joint_name([panel.inputs for panel in group]), *sizes): group
        for (_, *sizes), group in groups.items()
    }


def _measured(groups: _Groups) -> bool:
    return any(panel.curves or panel.yardstick is not None for group in groups.values() for panel in group)


def _lines(group: Sequence[Panel]) -> list[tuple[str, int | None]]:
    """The mean of the values, then each backend with the largest size that every panel has."""
    found: list[tuple[str, int | None]] = []
    if all(panel.yardstick is not None for panel in group):
        found.append((MEAN_OF_VALUES, None))
    for label in dict.fromkeys(curve.label for panel in group for curve in panel.curves):
        sizes = [
            {point.size for point in curve.points} if (curve := p.curve(label)) else set() for p in group
        ]
        common = set.intersection(*sizes)
        if common:
            found.append((label, max(common, key=lambda size: size or 0)))
    return found


def _cell(group: Sequence[Panel], label: str, size: int | None) -> str:
    """`0.33 (0.32 to 0.52)`: the median and the range over panels; empty where one lacks the size."""
    values = [_value(panel, label, size) for panel in group]
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return ""
    middle, low, high = (show_error(value) for value in (median(known), min(known), max(known)))
    return middle if low == high else f"{middle} ({low} to {high})"


def _value(panel: Panel, label: str, size: int | None) -> float | None:
    if label == MEAN_OF_VALUES:
        return panel.yardstick
    curve = panel.curve(label)
    return next((point.value for point in curve.points if point.size == size), None) if curve else None
