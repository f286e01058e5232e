"""Least errors of attention weights: lines by rank, and backends closest to them."""

from collections.abc import Sequence
from typing import Any

from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import sized
from efficient_attn.report import text
from efficient_attn.report.figures import LIMIT_STYLE
from efficient_attn.report.text import show_error

_FLOOR, _UNBIASED = "floor of rank-m weights", "best unbiased estimate"
STYLES = {_FLOOR: LIMIT_STYLE, _UNBIASED: {**LIMIT_STYLE, "linestyle": "--"}}
NOTES = {
    _FLOOR: "no weights of rank m, before a causal mask, err less",
    _UNBIASED: "mean of m independent terms of rank one, beaten by weights divided by their own sums",
}

# Smaller floors are rounding: weights of their rank can be exact.
_ROUNDING = 1e-4


def bounds(records: Sequence[Record]) -> dict[str, dict[int, float]]:
    """Least errors by label and rank, at ranks that are the size of a backend."""
    lines: dict[str, dict[int, float]] = {}
    ranked = {x.weights_rank: x for x in records if x.weights_rank and x.weights_rank == sized(x.case).size}
    for rank, record in sorted(ranked.items()):
        for label, error in ((_FLOOR, record.weights_floor), (_UNBIASED, record.weights_unbiased_error)):
            if error is not None:
                lines.setdefault(label, {})[rank] = error
    return lines


def sentences(panels: Sequence[Any]) -> list[str]:
    """The floor of the largest rank that is not exact, and the backend of that rank closest to it."""
    texts = []
    for panel in panels:
        floors = {m: floor for m, floor in panel.bounds.get(_FLOOR, {}).items() if floor > _ROUNDING}
        rank = max(floors, default=0)
        points = [(x.value, label, x.record) for label, curve in panel.curves.items() for x in curve]
        ranked = [(error, label) for error, label, record in points if record.weights_rank == rank]
        if ranked:
            error, label = min(ranked)
            floor = f"no map of {rank} features below {show_error(floors[rank])}"
            texts.append(f"{text.describe(panel.inputs)}: {floor} ({label} {show_error(error)})")
    return [f"Error of the attention weights. {'; '.join(texts)}."] if texts else []
