"""Records with errors per head, as one row per backend."""

from collections.abc import Iterable
from typing import NamedTuple

from efficient_attn.analysis.accuracy import Panel, panels
from efficient_attn.sweep.records import Record
from efficient_attn.sweep.sizes import YARDSTICKS

HEADS = "output_relative_error_heads"


class HeadRow(NamedTuple):
    """Relative output error of each head of one backend, at its largest size.

    Attributes:
        label: The backend with all its options.
        yardstick: Whether it is a baseline.
        values: Means over draws; None if a draw was not finite.
    """

    label: str
    backend: str
    yardstick: bool
    values: tuple[float | None, ...]


def heads(records: Iterable[Record]) -> tuple[tuple[Panel, tuple[HeadRow, ...]], ...]:
    """Inputs with errors per head, and their rows, baselines first."""
    with_heads = [record for record in records if getattr(record, HEADS)]
    return tuple((panel, _rows(panel, with_heads)) for panel in panels(with_heads, "output_relative_error"))


def _rows(panel: Panel, records: Iterable[Record]) -> tuple[HeadRow, ...]:
    last = [curve.points[-1].record for curve in (*panel.others, *panel.curves)]
    plainest = [r for r in records if r.case.backend == YARDSTICKS[0] and r.case.inputs == panel.inputs]
    return tuple(
        HeadRow(
            record.case.label,
            record.case.backend,
            record.case.backend in YARDSTICKS,
            tuple(record.output_relative_error_heads or ()),
        )
        for record in (*plainest[:1], *last)
    )
