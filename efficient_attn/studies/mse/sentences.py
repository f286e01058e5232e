"""What the errors say, in a few sentences computed from the records."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from efficient_attn.report.error_table import describe, show_error
from efficient_attn.runner.records import Record
from efficient_attn.stats.candidates import operations_share
from efficient_attn.studies.mse.analysis import Panel, below_from, panels, quantity_in
from efficient_attn.studies.mse.plan import PAIR_NORMS

# A relative standard error of more digits may be more than a float holds.
_MOST_DIGITS = 9

_POSITIVE = "performer-positive"


def sentences(records: Sequence[Record], environment: Mapping[str, Any] | None = None) -> list[str]:
    """Random features compared with the mean of V and with each other, and backends that are useful.

    Args:
        environment: Environment of the run, with the norms of its inputs.
    """
    shown = panels(records, quantity_in(records))
    real = [panel for panel in shown if panel.source != "gaussian"]
    drawn = [panel for panel in shown if panel.source == "gaussian"]
    told = [
        _random_features(real or drawn),
        _reason([*drawn, *real], environment or {}),
        _useful(real or drawn),
    ]
    return [sentence for sentence in told if sentence is not None]


def _random_features(shown: Sequence[Panel]) -> str | None:
    """On how many inputs random features are no better than the mean of V, at their largest size."""
    pairs = [
        (panel, panel.yardstick, curve)
        for panel in shown
        for curve in panel.curves
        if curve.random and panel.yardstick is not None
    ]
    if not pairs:
        return None
    label = min((curve for *_, curve in pairs), key=lambda curve: curve.points[-1].value).label
    best = [(panel, yardstick, curve.points[-1]) for panel, yardstick, curve in pairs if curve.label == label]
    worse = sum(point.value >= yardstick for _, yardstick, point in best)
    places = "; ".join(
        f"{describe(panel.inputs)}: {show_error(point.value)} against {show_error(yardstick)}"
        for panel, yardstick, point in best
    )
    return (
        f"The best untrained random features ({label}, size {best[0][2].size}) are no better than the "
        f"mean of V on {worse} of {len(best)} inputs ({places})."
    )


def _reason(shown: Sequence[Panel], environment: Mapping[str, Any]) -> str | None:
    """How far one weight scatters at the measured norms: √((exp(|x + y|²) − 1) / m) of its value."""
    norms = environment.get(PAIR_NORMS)
    norms = norms if isinstance(norms, dict) else {}
    told = []
    for panel in shown:
        curve = next((curve for curve in panel.curves if curve.backend == _POSITIVE), None)
        norm = norms.get(panel.inputs)
        known = isinstance(norm, (int, float)) and not isinstance(norm, bool)
        size = curve.points[-1].size if curve is not None and curve.random else None
        if norm is not None and known and 0 <= norm < math.inf and size:
            # The logarithm keeps what no float can hold.
            log10 = (norm + math.log(-math.expm1(-norm) or 1.0) - math.log(size)) / 2 / math.log(10)
            scatter = show_error(10**log10) if log10 < _MOST_DIGITS else f"10^{log10:.0f}"
            place = f"{describe(panel.inputs)}: |x+y|² {show_error(float(norm))}"
            told.append(f"{place}, {size} features, {scatter}")
    if not told:
        return None
    return (
        "The reason: one weight estimated by m positive features has a relative standard error of "
        "√((exp(|x+y|²) − 1) / m), with x, y = q, k / d^¼; above 1 its scatter hides the differences between "
        "keys, and the output is no nearer than uniform attention. At the median |x+y|² over queries and "
        f"keys: {'; '.join(told)}."
    )


def _useful(shown: Sequence[Panel]) -> str | None:
    """What is below the mean of V on every input, and from which size on."""
    if not shown or any(panel.yardstick is None for panel in shown):
        return None
    found = []
    for label in dict.fromkeys(curve.label for panel in shown for curve in panel.curves):
        pairs = [(panel.curve(label), panel.yardstick or 0.0) for panel in shown]
        sizes = [below_from(curve, yardstick) if curve else None for curve, yardstick in pairs]
        if None not in sizes:
            found.append(f"{label} from size {max(size for size in sizes if size is not None)}")
    verdict = ", ".join(found) or "nothing measured here"
    return f"Below the mean of V on every input: {verdict}.{_no_fewer_operations(shown)}"


def _no_fewer_operations(shown: Sequence[Panel]) -> str:
    """From which size on an approximation takes as many operations as exact attention, or more."""
    least: dict[str, int] = {}
    points = [(curve, point) for panel in shown for curve in panel.curves for point in curve.points]
    for curve, point in points:
        share = operations_share(point.record)
        if point.size is not None and share is not None and share >= 1:
            least[curve.label] = min(point.size, least.get(curve.label, point.size))
    tokens = min(panel.tokens for panel in shown)
    names = ", ".join(f"{label} from size {size}" for label, size in least.items())
    return f" No fewer operations than exact attention at {tokens} tokens: {names}." if names else ""
