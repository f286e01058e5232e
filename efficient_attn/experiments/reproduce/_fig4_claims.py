"""Claims of Choromanski et al. 2021 in figure 4 and its text, judged by records."""

from collections.abc import Mapping, Sequence

from efficient_attn.analysis.statistics import Middle
from efficient_attn.analysis.verdicts import FAILS, HOLDS, NOT_MEASURABLE, Finding, turns_round
from efficient_attn.experiments.reproduce._fig4 import (
    IID,
    ORTHOGONAL,
    POSITIVE,
    TRIGONOMETRIC,
    Key,
    Samples,
    at_equal_sizes,
    between,
    samples_of,
    turning_norm,
)
from efficient_attn.sweep.records import Record
from efficient_attn.sweep.sizes import MEAN_OF_VALUES

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
