"""Options, intervals, verdicts and output files that the examples of this folder share."""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import comb
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"

_ROOT = Path(__file__).parents[3]

# Letters that stay readable on a phone at the width of the figures, 6 inches.
plt.rcParams.update(
    {
        **dict.fromkeys(("font.size", "axes.titlesize", "legend.fontsize"), 9),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
        "axes.grid": True,
        "axes.titlelocation": "left",
        "grid.color": "0.9",
    }
)


class Claim(NamedTuple):
    """Statement of a paper with its place, our measurement, and a verdict."""

    statement: str
    measured: str
    verdict: str


class Interval(NamedTuple):
    """Median of samples with a 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2g} ({self.low:.2g} to {self.high:.2g})"

    def above(self, level: float = 1.0) -> bool | None:
        """Whether the interval is above a level, or None if it contains the level."""
        return None if self.low <= level <= self.high else self.low > level


def parse_arguments(description: str | None) -> argparse.Namespace:
    """Parse `--quick` and `--out`, start the clock and run torch on one thread."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="small sizes, only to test that the script runs")
    parser.add_argument("--out", type=Path, help="folder of the JSON file and the plot")
    arguments = parser.parse_args()
    arguments.out = arguments.out or _ROOT / ("runs" if arguments.quick else "results") / "papers"
    arguments.start_s = time.perf_counter()
    torch.set_num_threads(1)
    return arguments


def median_interval(samples: Sequence[float]) -> Interval:
    """Median, and the order statistics that bracket it with 95 % confidence. Needs six samples."""
    ordered, count = sorted(samples), len(samples)
    outside = 0
    while sum(comb(count, below) for below in range(outside + 2)) / 2**count <= 0.025:
        outside += 1
    return Interval(median(ordered), ordered[outside], ordered[-1 - outside])


def time_ratio(slow: Any, fast: Any) -> Interval:
    """Time of `slow` over time of `fast`. Every interleaved round is one sample."""
    rounds = []
    for record in (slow, fast):
        ends = accumulate(record.round_sizes, initial=0)
        rounds.append([median(record.times_s[start:end]) for start, end in pairwise(ends)])
    return median_interval([above / below for above, below in zip(*rounds, strict=True)])


def verdict(answers: Mapping[str, bool | None]) -> str:
    """Verdict on a statement from its answers by place. None is an answer within the noise."""
    wrong = [place for place, answer in answers.items() if answer is False]
    decided = [place for place, answer in answers.items() if answer is not None]
    if not decided:
        return UNDECIDED
    if len(wrong) == len(answers):
        return FAILS
    if wrong:
        return f"depends: fails at {', '.join(wrong)}"
    open_places = [place for place in answers if place not in decided]
    return f"{HOLDS}; undecided at {', '.join(open_places)}" if open_places else HOLDS


def measured_ticks(ax: Any, values: Sequence[float]) -> None:
    """Make the x axis logarithmic, with ticks at the measured values only."""
    ax.set_xscale("log")
    ax.set_xticks(values, [f"{value:g}" for value in values])
    ax.set_xticks([], minor=True)


def name_line(ax: Any, line: Any, name: str, *, shift: float = 0) -> None:
    """Write a name at the right end of a line, `shift` points above it."""
    end = (line.get_xdata()[-1], line.get_ydata()[-1])
    ax.annotate(
        name,
        end,
        (6, shift),
        textcoords="offset points",
        va="center",
        color=line.get_color(),
        annotation_clip=False,
    )


def report(
    name: str,
    paper: str,
    claims: Sequence[Claim],
    *,
    arguments: argparse.Namespace,
    settings: Mapping[str, Any],
    numbers: Mapping[str, Any],
    figure: Any,
) -> None:
    """Print the claims, and write NAME.json and NAME.png."""
    print(paper)
    for claim in claims:
        print(f"\nClaim:    {claim.statement}\nMeasured: {claim.measured}\nVerdict:  {claim.verdict}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    content = {
        "paper": paper,
        "settings": {
            **settings,
            "quick": arguments.quick,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "seconds": round(time.perf_counter() - arguments.start_s),
        },
        "claims": [claim._asdict() for claim in claims],
        "numbers": numbers,
    }
    path = arguments.out / f"{name}.json"
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    figure.savefig(path.with_suffix(".png"), dpi=180, bbox_inches="tight", metadata={"Software": None})
    print(f"\nWritten: {path} and {path.with_suffix('.png').name}")
