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
    """Two charts for each task, and in the legend of a single task the best accuracies."""
    shown = contests(records)
    return Plot(
        "Accuracy of recall after training",
        f"{heading(shown[0]) if len(shown) == 1 else ''}\n"
        "points: mean over seeds with its 95 % interval; dashed: guessing; dots: places of markers that are "
        "moved sideways",
        tuple((chart,) for one in shown for chart in _charts(one, heading(one) if len(shown) > 1 else "")),
        tuple(entry for one in shown for entry in _entries(one, numbered=len(shown) == 1)),
        "best accuracy" if len(shown) == 1 else "",
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
    """One for each backend over its sizes, with intervals over seeds."""
    styles, made = _styles(one), []
    for name, rows in _rows(one).items():
        known = [(place, row.accuracy) for row in rows if (place := x(row)) and row.accuracy]
        places = [place for place, _ in known]
        means = [accuracy.mean for _, accuracy in known]
        low, high = ([accuracy.edges[side] for _, accuracy in known] for side in (0, 1))
        made.append(Series(name, places, means, styles[name], low, high, bars=True))
    return made


def _rows(one: Contest) -> dict[str, list[Learned]]:
    """The rows of each backend by size; a control stands by itself."""
    found: dict[str, list[Learned]] = {}
    for row in one.rows:
        if row.accuracy is not None:
            found.setdefault(row.label if row in one.controls else row.sized.series, []).append(row)
    return {name: sorted(rows, key=lambda row: row.sized.size or 0) for name, rows in found.items()}


def _styles(one: Contest) -> dict[str, dict[str, Any]]:
    """Colour and marker of each series; controls are grey."""
    controls = [row.label for row in one.controls]
    named = {name: rows[0].case.backend for name, rows in _rows(one).items() if name not in controls}
    grey = {
        label: {"color": MUTED, "marker": _GREY_MARKS[number % 2], "linestyle": "none", "markersize": 7}
        for number, label in enumerate(controls)
    }
    return line_styles(sorted(named.items())) | grey


def _entries(one: Contest, *, numbered: bool) -> list[Series]:
    """Every name with its best accuracy, the best first."""
    styles = _styles(one)
    best = {name: max(row.accuracy.mean for row in rows if row.accuracy) for name, rows in _rows(one).items()}
    return [
        Series(name, (), (), styles[name], entry=f"{accuracy:.2f}  {name}" if numbered else name)
        for name, accuracy in sorted(best.items(), key=lambda item: -item[1])
    ]
