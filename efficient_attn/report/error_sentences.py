"""What the errors say, in a few sentences computed from the records."""

from collections.abc import Sequence

from efficient_attn.analysis.accuracy import ErrorCurve, Panel, below_from, panels, quantity_in
from efficient_attn.report.error_table import describe, show_error
from efficient_attn.report.parts import part_sentence
from efficient_attn.sweep.records import Record

_POSITIVE, _TRIGONOMETRIC = "performer-positive", "performer-trig"


def sentences(records: Sequence[Record], *, y: str = "output_relative_error") -> list[str]:
    """Random features against the mean of V, their two maps against each other, and what is of use."""
    shown = panels(records, quantity_in(records, y))
    real = [panel for panel in shown if panel.source != "gaussian"]
    drawn = [panel for panel in shown if panel.source == "gaussian"]
    told = [_random_features(real or drawn), _maps(drawn), _useful(real or drawn), part_sentence(records)]
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
        f"mean of V on {worse} of {len(best)} {_kind(shown)} input{_s(best)} ({places})."
    )


def _maps(shown: Sequence[Panel]) -> str | None:
    """At which norms trigonometric features err less than positive ones."""
    parts = []
    for panel in shown:
        positive, trigonometric = (_named(panel, name) for name in (_POSITIVE, _TRIGONOMETRIC))
        if positive is None or trigonometric is None:
            continue
        both = [(one, other) for one in positive.points if (other := trigonometric.at(one.size or 0))]
        if not both:
            continue
        wins = sum(other.value < one.value for one, other in both)
        one, other = both[-1]
        parts.append(
            f"on {describe(panel.inputs)} at {wins} of {len(both)} sizes "
            f"({one.size}: {show_error(other.value)} against {show_error(one.value)})"
        )
    return f"Trigonometric features err less than positive ones {', '.join(parts)}." if parts else None


def _useful(shown: Sequence[Panel]) -> str | None:
    """What is below the mean of V on every input, and from which size on."""
    if not shown or any(panel.yardstick is None for panel in shown):
        return None
    found = []
    for label in dict.fromkeys(curve.label for panel in shown for curve in panel.curves):
        curves = [_labelled(panel, label) for panel in shown]
        sizes = [
            below_from(curve, panel.yardstick or 0) if curve else None
            for curve, panel in zip(curves, shown, strict=True)
        ]
        known = [size for size in sizes if size is not None]
        if len(known) == len(shown):
            found.append(f"{label} from size {max(known)}")
    verdict = ", ".join(found) or "nothing measured here"
    inputs = f"{_kind(shown)} input{_s(shown)}"
    return f"Below the mean of V on {len(shown)} of {len(shown)} {inputs}: {verdict}."


def _kind(shown: Sequence[Panel]) -> str:
    return "Gaussian" if shown[0].source == "gaussian" else "real"


def _s(counted: Sequence[object]) -> str:
    return "" if len(counted) == 1 else "s"


def _named(panel: Panel, backend: str) -> ErrorCurve | None:
    return next((curve for curve in panel.curves if curve.backend == backend), None)


def _labelled(panel: Panel, label: str) -> ErrorCurve | None:
    return next((curve for curve in panel.curves if curve.label == label), None)
