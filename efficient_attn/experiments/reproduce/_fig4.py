"""Figure 4 of Choromanski et al. 2021 as data: which records are which line, and their ratios by sample."""

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from efficient_attn.analysis.statistics import Middle, middle
from efficient_attn.sweep.records import Case, Record
from efficient_attn.sweep.sizes import sized

TRIGONOMETRIC, POSITIVE = "performer-trig", "performer-positive"
BACKENDS = (POSITIVE, TRIGONOMETRIC)
IID, ORTHOGONAL = "iid", "orthogonal"
PROJECTIONS = (ORTHOGONAL, IID)

MSE = "output_mse"


class Key(NamedTuple):
    """A line at one size; yardsticks have no projection."""

    backend: str
    projection: str | None
    size: int | None


# Errors of every sample, by norm and line.
Samples = dict[float, dict[Key, tuple[float, ...]]]


def inputs(norm: float) -> str:
    """Name in records of Gaussian inputs that are drawn anew for each sample."""
    return f"gaussians(norm={norm:g})"


def norm_of(case: Case) -> float:
    """The norm that a case is about."""
    found = re.search(r"norm=([\d.]+)", case.inputs)
    return float(found[1]) if found else math.nan


def samples_of(records: Sequence[Record]) -> Samples:
    """Everything that was measured, by rising norm."""
    found: Samples = {}
    for record in sorted(records, key=lambda record: norm_of(record.case)):
        case = record.case
        if record.status == "ok" and record.output_mse_draws:
            key = Key(case.backend, case.options.get("projection"), sized(case).size)
            found.setdefault(norm_of(case), {})[key] = record.output_mse_draws
    return found


def at_equal_sizes(found: Samples, above: Key, below: Key) -> dict[float, Middle]:
    """At every norm: how many times the error of `above` is that of `below`, at all sizes of both."""
    return _ratios(
        {
            norm: [
                (errors, lines[below._replace(size=key.size)])
                for key, errors in lines.items()
                if key._replace(size=None) == above and below._replace(size=key.size) in lines
            ]
            for norm, lines in found.items()
        }
    )


def between(found: Samples, above: Key, below: Key) -> dict[float, Middle]:
    """The same of two lines at the sizes that stand in their keys."""
    return _ratios(
        {
            norm: [(lines[above], lines[below])]
            for norm, lines in found.items()
            if above in lines and below in lines
        }
    )


def turning_norm(ratio: dict[float, Middle]) -> float | None:
    """Where the ratio passes 1, between neighbouring norms on logarithmic scales; None if nowhere."""
    places = [(math.log(norm), math.log(one.median)) for norm, one in sorted(ratio.items())]
    for (norm, log), (following, other) in pairwise(places):
        if log * other < 0:
            return math.exp(norm + (following - norm) * log / (log - other))
    return None


def _ratios(pairs: dict[float, list[tuple[tuple[float, ...], tuple[float, ...]]]]) -> dict[float, Middle]:
    """Median over samples of the geometric mean of the error ratios."""
    made = {}
    for norm, both in pairs.items():
        if both:
            logs = np.mean([np.log(above) - np.log(below) for above, below in both], axis=0)
            centre = middle(logs.tolist())
            median, low, high = (math.exp(edge) for edge in centre[:3])
            made[norm] = Middle(median, low, high, centre.samples)
    return made
