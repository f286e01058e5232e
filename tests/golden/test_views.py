"""Stored runs show the stored tables, sentences and plots. As a script, this file stores them anew."""

from pathlib import Path
from typing import Any

import pytest

import efficient_attn as ea
from efficient_attn.report.figures import Chart, Plot
from efficient_attn.report.table import to_markdown

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "results" / "epyc-2-cores"

# `failures` is a part of bench-256-4096 with failed points; `kernel` is a short run of mse --of kernel.
RUNS = {
    **{path.name: path for path in sorted((FOLDER / "runs").iterdir())},
    **{
        name: RESULTS / name
        for name in (
            *("bench-256-4096", "bench-causal-backward", "compare", "compare-encoder-128"),
            *("mse-default", "recall-default", "swap-encoder", "swap-smollm2-4096"),
            "advise-smollm2-4096",
        )
    },
}


def text_of(run: Path) -> str:
    """Everything that a run shows."""
    results = ea.read(run)
    plots = [line for name, plot in results.plots().items() for line in (f"## {name}", *_plot(plot))]
    return "\n".join([*map(to_markdown, results.tables()), *results.sentences(), *plots]) + "\n"


def _plot(plot: Plot) -> list[str]:
    lines = [plot.title, *plot.conditions.splitlines()]
    return [*lines, *(line for chart in plot.charts for line in _chart(chart.drawable()))]


def _chart(chart: Chart) -> list[str]:
    axes = [
        f"{name}: {axis.label}, {axis.scale}, {_numbers(axis.limits or ())}, {_ticks(axis.ticks)}"
        for name, axis in (("x", chart.x), ("y", chart.y))
    ]
    lines = [
        f"- {line.label}: {'; '.join(map(_numbers, (line.x, line.y, line.low, line.high)))}; "
        f"{line.style.get('fillstyle', '')}"
        for line in chart.series
    ]
    return [f"### {chart.title}", *chart.notes, *axes, *lines]


def _ticks(ticks: Any) -> str:
    return ", ".join(ticks.values()) if isinstance(ticks, dict) else _numbers(ticks)


def _numbers(values: Any) -> str:
    return " ".join("–" if value is None else f"{value:.3g}" for value in values)


@pytest.mark.parametrize("name", RUNS)
def test_a_stored_run_shows_its_stored_view(name: str) -> None:
    assert text_of(RUNS[name]) == (FOLDER / "views" / f"{name}.md").read_text()


if __name__ == "__main__":
    for name, run in RUNS.items():
        (FOLDER / "views" / f"{name}.md").write_text(text_of(run))
