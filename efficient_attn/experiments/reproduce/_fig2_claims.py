"""Claims of Choromanski et al. 2021 in figure 2 and its text, judged by records."""

from collections.abc import Sequence

from efficient_attn.analysis.verdicts import FAILS, HOLDS, NOT_MEASURABLE, Finding, turns_round
from efficient_attn.experiments.reproduce._fig2 import (
    POSITIVE,
    TRIGONOMETRIC,
    Place,
    Utility,
    directions_of,
    errors,
    measured_turning_angle,
    predicted_error,
    trusted,
    turning_angle,
    utilities,
)
from efficient_attn.sweep.records import Record

# Equal directions, and equal features: a direction is one positive feature, but a cosine and a sine.
DIRECTIONS, FEATURES = 1.0, 0.5

_STANDARD_ERRORS = 4.0

# Squared errors of estimates that are exact are rounding below this.
_ROUNDING = 1e-20


def findings(records: Sequence[Record]) -> list[Finding]:
    """A verdict on every claim."""
    return [
        follows_the_lemma(records),
        arbitrarily_better(records),
        better(records, DIRECTIONS, "with as many directions (figure 2)"),
        better(records, FEATURES, "with as many features, two for each direction of trigonometric ones"),
    ]


def follows_the_lemma(records: Sequence[Record]) -> Finding:
    """Every measured error that can be trusted is that of the closed form, within its standard errors."""
    claim = "Mean squared errors are those of lemma 2"
    scores = [
        abs((record.kernel_mse or 0) / record.expected_kernel_mse - 1)
        / predicted_error(place, backend, directions_of(record))
        for backend in (TRIGONOMETRIC, POSITIVE)
        for place, record in errors(records, backend).items()
        if record.expected_kernel_mse and trusted(place, directions_of(record))
    ]
    if not scores:
        return Finding(claim, "no error could be trusted", NOT_MEASURABLE)
    places = errors(records, POSITIVE)
    left = sum(not trusted(place, directions_of(record)) for place, record in places.items())
    text = (
        f"{len(scores)} errors within {max(scores):.1f} predicted standard errors of the closed form; "
        f"{left} of {len(places)} pairs left out, whose |x + y|² is too large to sample"
    )
    return Finding(claim, text, HOLDS if max(scores) <= _STANDARD_ERRORS else FAILS)


def arbitrarily_better(records: Sequence[Record]) -> Finding:
    """At every norm the ratio rises with the angle to above one, and the error is zero for y = −x."""
    claim = "For angles large enough positive features are arbitrarily more accurate (figure 2)"
    found = utilities(records)
    opposite = [
        (record.kernel_mse or 0.0, errors(records, TRIGONOMETRIC)[place].kernel_mse or 0.0)
        for place, record in errors(records, POSITIVE).items()
        if not place.sum_square and place in errors(records, TRIGONOMETRIC)
    ]
    if not found or not opposite:
        return Finding(claim, "no pair with a large angle was measured", NOT_MEASURABLE)
    place, most = max(found.items(), key=lambda item: item[1].value)
    exact = all(below < _ROUNDING < above for below, above in opposite)
    text = (
        f"r up to {most.value:.3g} ({most.low:.3g} to {most.high:.3g}) at {place.angle:g}°, "
        f"l = {place.norm:g}; for y = −x positive features are "
        + ("exact to rounding, trigonometric ones not" if exact else "no more exact than trigonometric ones")
    )
    return Finding(claim, text, HOLDS if exact and most.low > 1 else FAILS)


def better(records: Sequence[Record], level: float, share: str) -> Finding:
    """Where positive features have the smaller error at equal cost, and from which angle on they do."""
    claim = f"Positive features have the smaller error {share}"
    found = utilities(records)
    clear = {place: one for place, one in found.items() if one.low > level or one.high < level}
    if not clear:
        return Finding(claim, "no clear difference was measured", NOT_MEASURABLE)
    wins = [place for place in clear if found[place].value > level]
    angles = _turning(found, level)
    text = f"smaller at {len(wins)} of {len(clear)} pairs with a clear difference"
    if angles:
        text += f"; r = {level:g} at {', '.join(angles)}"
    if len(wins) == len(clear):
        return Finding(claim, text, HOLDS)
    if not wins:
        return Finding(claim, text, FAILS)
    norms = sorted({place.norm for place in clear if place not in wins})
    edges = (turning_angle(norm, level) for norm in (norms[0], norms[-1]))
    low, high = (f"{edge:.0f}°" for edge in edges)
    where = f"{low} for vectors of length {norms[0]:g} (closed form)" + (
        f", below {high} for length {norms[-1]:g}" if len(norms) > 1 else ""
    )
    return Finding(claim, text, turns_round(f"the angle is below {where}"))


def _turning(found: dict[Place, Utility], level: float) -> list[str]:
    """Measured and theoretical crossover angle for every norm."""
    norms = dict.fromkeys(place.norm for place in found)
    angles = {norm: measured_turning_angle(found, norm, level) for norm in norms}
    return [
        f"{angle:.1f}° (l = {norm:g}, closed form {turning_angle(norm, level):.1f}°)"
        for norm, angle in angles.items()
        if angle is not None
    ]
