"""Accuracy after training, against the state that a query reads and against the error before training."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from efficient_attn.report.error_table import show_error
from efficient_attn.report.figures import Axis, Chart, Plot, Series
from efficient_attn.report.palette import MUTED, UNIFORM_STYLE, line_styles
from efficient_attn.runner.records import Record
from efficient_attn.studies.recall.analysis import Contest, Learned, contests
from efficient_attn.studies.recall.tables import heading
from efficient_attn.studies.view import Environment, Plots

# Errors below this numerical noise floor are not drawn.
_ROUNDING = 1e-4
_GREY_MARKS: tuple[Any, ...] = ((4, 1, 0), (4, 2, 0))


def plots(records: Sequence[Record], environment: Environment) -> Plots:
    """The figure of all tasks; none if nothing was trained."""
    trained = any(record.status == "ok" for record in records)
    return {"recall": partial(recall_plot, records)} if trained else {}


def recall_plot(records: Sequence[Record]) -> Plot:
    """Two charts for each task."""
    shown = contests(records)
    return Plot(
        "Accuracy of recall after training",
        f"{heading(shown[0]) if len(shown) == 1 else ''}\n"
        "points: mean over seeds with its 95 % interval; dashed: guessing; dots: places of markers that are "
        "moved sideways",
        tuple((chart,) for one in shown for chart in _charts(one, heading(one) if len(shown) > 1 else "")),
    )


def _charts(one: Contest, head: str) -> list[Chart]:
    accuracy = Axis("accuracy after training", limits=(0, 1.04))
    guess = Series("", (), (one.rows[0].chance,), UNIFORM_STYLE, entry="")
    reads = Axis("state size per query and head, floats read", "log2", "{:.0f}".format)
    errs = Axis("relative output error before training", "log", show_error)
    by_state = _series(one, lambda row: row.floats_read)
    by_error = _series(one, lambda row: row.untrained if (row.untrained or 0) > _ROUNDING else None)
    return [
        Chart(reads, accuracy, (guess, *by_state), title=head, apart=True),
        Chart(errs, accuracy, (guess, *by_error), notes=("without exact attention",), apart=True),
    ]


def _series(one: Contest, x: Callable[[Learned], float | None]) -> list[Series]:
    """One for each backend over its sizes, with intervals over seeds; controls are grey."""
    controls = [row.label for row in one.controls]
    groups: dict[str, list[Learned]] = {}
    for row in sorted(one.rows, key=lambda row: row.sized.size or 0):
        if row.accuracy is not None:
            groups.setdefault(row.label if row.label in controls else row.sized.series, []).append(row)
    named = {name: rows[0].case.backend for name, rows in groups.items() if name not in controls}
    styles = line_styles(sorted(named.items()))
    for number, label in enumerate(controls):
        mark = _GREY_MARKS[number % 2]
        styles[label] = {"color": MUTED, "marker": mark, "linestyle": "none", "markersize": 7}
    made = []
    for name, rows in groups.items():
        known = [(place, row.accuracy) for row in rows if (place := x(row)) and row.accuracy]
        places, means = [place for place, _ in known], [accuracy.mean for _, accuracy in known]
        low, high = ([accuracy.edges[side] for _, accuracy in known] for side in (0, 1))
        made.append(Series(name, places, means, styles[name], low, high, bars=True))
    return made
