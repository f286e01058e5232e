"""Figure 4 of Choromanski et al. 2021 judged by records: ratios of errors, sample by sample."""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import numpy as np

from efficient_attn.runner.record import Case, Record, replace
from efficient_attn.runner.sizes import MEAN_OF_VALUES, ORACLE, TAYLOR, sized
from efficient_attn.stats.median import Middle, middle
from efficient_attn.stats.verdicts import FAILS, HOLDS, NOT_MEASURABLE, Finding, turns_round

TRIGONOMETRIC, POSITIVE = "performer-trig", "performer-positive"
BACKENDS = (POSITIVE, TRIGONOMETRIC)
IID, ORTHOGONAL = "iid", "orthogonal"
PROJECTIONS = (ORTHOGONAL, IID)

MSE = "output_mse"

# Baselines that are measured on the first sample alone.
FIXED = (ORACLE, TAYLOR)


class Key(NamedTuple):
    """A line at one size; yardsticks have no projection."""

    backend: str
    projection: str | None
    size: int | None


# Errors of every sample, by norm and line.
Samples = dict[float, dict[Key, tuple[float, ...]]]


def norm_of(case: Case) -> float:
    """The norm that a case is about."""
    found = re.search(r"norm=([\d.]+)", case.inputs)
    return float(found[1]) if found else math.nan


def merged(records: Sequence[Record]) -> list[Record]:
    """One record of all samples for each norm and line, as runs wrote them before one record per sample.

    Samples that lack one of the lines are left out, so that lines are compared sample by sample.
    """
    found = [record for record in records if _is_merged(record)]
    groups: dict[float, dict[str, list[Record]]] = {}
    for record in records:
        if not _is_merged(record):
            groups.setdefault(norm_of(record.case), {}).setdefault(record.case.label, []).append(record)
    for norm, lines in groups.items():
        measured = {label: {r.case.seed for r in line if r.status == "ok"} for label, line in lines.items()}
        # Baselines but for the mean of the values have one sample.
        drawn = [measured[label] for label, line in lines.items() if line[0].case.backend not in FIXED]
        common = set.intersection(*(filter(None, drawn))) if any(drawn) else set()
        for label, line in lines.items():
            wanted = measured[label] if line[0].case.backend in FIXED else common & measured[label]
            chosen = sorted((r for r in line if r.case.seed in wanted), key=lambda r: r.case.seed)
            found.append(_joined(chosen or line[:1], f"gaussians(norm={norm:g})"))
    return found


def _is_merged(record: Record) -> bool:
    return record.case.inputs.startswith("gaussians")


def _joined(records: Sequence[Record], name: str) -> Record:
    case = replace(records[0].case, inputs=name)
    errors = tuple(record.output_mse for record in records if record.output_mse is not None)
    if not errors:
        return replace(records[0], case=case)
    unsafe = [record.unsafe_rows for record in records if record.unsafe_rows is not None]
    return replace(
        records[0],
        case=case,
        output_mse=fmean(errors),
        output_mse_draws=errors,
        unsafe_rows=fmean(unsafe) if unsafe else None,
    )


def samples_of(records: Sequence[Record]) -> Samples:
    """Everything that was measured, by rising norm."""
    found: Samples = {}
    for record in sorted(merged(records), key=lambda record: norm_of(record.case)):
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


_WORDS = {POSITIVE: "positive", TRIGONOMETRIC: "trigonometric"}


def findings(records: Sequence[Record]) -> list[Finding]:
    """A verdict on every claim."""
    found = samples_of(records)
    return [
        *(positive_is_better(found, projection) for projection in (ORTHOGONAL, IID)),
        *(orthogonal_is_better(found, backend) for backend in (POSITIVE, TRIGONOMETRIC)),
        *(more_features_help(found, backend) for backend in (POSITIVE, TRIGONOMETRIC)),
        *(tells_more_than_the_mean(found, backend) for backend in (POSITIVE, TRIGONOMETRIC)),
    ]


def positive_is_better(found: Samples, projection: str) -> Finding:
    """Trigonometric features have the larger error at as many features, the most that were measured.

    With few features their denominators cross zero, so that small sizes are not representative.
    """
    claim = (
        f"Positive features have a lower error than trigonometric ones, {projection} directions (figure 4)"
    )
    most = max(_sizes(found, POSITIVE), default=0)
    ratio = between(found, *(Key(backend, projection, most) for backend in (TRIGONOMETRIC, POSITIVE)))
    return _judged(claim, f"with {most} features the error of trigonometric ones is", "times as large", ratio)


def orthogonal_is_better(found: Samples, backend: str) -> Finding:
    """Independent directions have the larger error at as many features, all sizes taken together."""
    claim = f"Orthogonal directions give a lower error than iid ones, {_WORDS[backend]} features (figure 4)"
    ratio = at_equal_sizes(found, Key(backend, IID, None), Key(backend, ORTHOGONAL, None))
    return _judged(claim, "the error with iid directions is", "times as large, mean over sizes", ratio)


def more_features_help(found: Samples, backend: str) -> Finding:
    """The error of the fewest features is the larger one."""
    claim = f"More features give a lower error, {_WORDS[backend]} ones, orthogonal (figure 4)"
    sizes = _sizes(found, backend)
    if len(sizes) < 2:
        return Finding(claim, "no two sizes were measured", NOT_MEASURABLE)
    few, many = (Key(backend, ORTHOGONAL, size) for size in (sizes[0], sizes[-1]))
    ratio = between(found, few, many)
    return _judged(claim, f"the error with {few.size} features is", f"times that with {many.size}", ratio)


def tells_more_than_the_mean(found: Samples, backend: str) -> Finding:
    """Not in the paper, but needed for any use: the output is nearer than uniform attention."""
    claim = f"The output is nearer than the mean of V, {_WORDS[backend]} features (not in the paper's figure)"
    sizes = _sizes(found, backend)
    if not sizes:
        return Finding(claim, "nothing was measured", NOT_MEASURABLE)
    ratio = between(found, Key(MEAN_OF_VALUES, None, None), Key(backend, ORTHOGONAL, sizes[-1]))
    return _judged(claim, "the error of the mean of V is", f"times that of {sizes[-1]} features", ratio)


def _judged(claim: str, before: str, after: str, ratio: Mapping[float, Middle]) -> Finding:
    """A claim that a ratio is above 1 at every norm."""
    if not ratio:
        return Finding(claim, "nothing was measured", NOT_MEASURABLE)
    told = "; ".join(f"{_times(one)} at norm {norm:g}" for norm, one in ratio.items())
    text = (
        f"{before} {told}: {after}, median and 95 % interval of {min(one.samples for one in ratio.values())}"
    )
    wrong = [norm for norm, one in ratio.items() if one.high < 1]
    right = [norm for norm, one in ratio.items() if one.low > 1]
    unclear = ", ".join(f"{norm:g}" for norm in ratio if norm not in wrong + right)
    noise = f"; no difference beyond noise at norm {unclear}" if unclear else ""
    if not wrong:
        return Finding(claim, text, f"{HOLDS}{noise}" if right else NOT_MEASURABLE + noise.replace(";", ":"))
    if not right:
        return Finding(claim, text, f"{FAILS}{noise}")
    edge = turning_norm(dict(ratio))
    side = "below" if max(wrong) < min(right) else "above" if min(wrong) > max(right) else None
    if side is None or edge is None:
        return Finding(
            claim, text, turns_round(f"the norm is {', '.join(f'{one:g}' for one in wrong)}") + noise
        )
    return Finding(claim, text, turns_round(f"the norm is {side} about {edge:.2f}") + noise)


def _times(one: Middle) -> str:
    return f"{one.median:.2g} ({one.low:.2g} to {one.high:.2g})"


def _sizes(found: Samples, backend: str) -> list[int]:
    return sorted(
        {
            key.size
            for lines in found.values()
            for key in lines
            if key[:2] == (backend, ORTHOGONAL) and key.size is not None
        }
    )
