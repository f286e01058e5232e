"""What the errors say, in a few sentences computed from the records."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from efficient_attn.measure.record import Record
from efficient_attn.report.text import describe, show_error
from efficient_attn.stats.candidates import operations_share
from efficient_attn.studies.mse.analysis import Panel, below_from, panels, quantity_in
from efficient_attn.studies.mse.plan import PAIR_NORMS

# The exponential of a larger number is more than a float holds.
_LARGEST_NORM = 700.0

_POSITIVE = "performer-positive"


def sentences(records: Sequence[Record], environment: Mapping[str, Any] | None = None) -> list[str]:
    """The scatter of random features at the norms of the inputs, and backends that are useful.

    Args:
        environment: Environment of the run, with the norms of its inputs.
    """
    shown = panels(records, quantity_in(records))
    real = [panel for panel in shown if panel.source != "gaussian"]
    drawn = [panel for panel in shown if panel.source == "gaussian"]
    found = [_reason([*drawn, *real], environment or {}), _useful(real or drawn)]
    return [sentence for sentence in found if sentence is not None]


def _reason(shown: Sequence[Panel], environment: Mapping[str, Any]) -> str | None:
    """How far one weight scatters at the measured norms: √((exp(|x + y|²) − 1) / m) of its value."""
    norms = environment.get(PAIR_NORMS)
    norms = norms if isinstance(norms, dict) else {}
    texts = []
    for panel in shown:
        curve = next((curve for curve in panel.curves if curve.backend == _POSITIVE), None)
        norm = norms.get(panel.inputs)
        size = None if curve is None else curve.points[-1].size
        if isinstance(norm, float) and 0 <= norm < _LARGEST_NORM and size:
            scatter = show_error(math.sqrt(math.expm1(norm) / size))
            place = f"{describe(panel.inputs)}: |x+y|² {show_error(norm)}"
            texts.append(f"{place}, {size} features, {scatter}")
    if not texts:
        return None
    return (
        "Random features: one weight estimated by m positive features has a relative standard error of "
        "√((exp(|x+y|²) − 1) / m), with x, y = q, k / d^¼; above 1 its scatter hides the differences between "
        "keys, and the output is no nearer than uniform attention. At the median |x+y|² over queries and "
        f"keys: {'; '.join(texts)}."
    )


def _useful(shown: Sequence[Panel]) -> str | None:
    """What is below uniform attention on every input, and from which size on."""
    if not shown or any(panel.yardstick is None for panel in shown):
        return None
    found = []
    for label in dict.fromkeys(curve.label for panel in shown for curve in panel.curves):
        pairs = [(panel.curve(label), panel.yardstick or 0.0) for panel in shown]
        sizes = [below_from(curve, yardstick) if curve else None for curve, yardstick in pairs]
        if None not in sizes:
            points = [point for curve, _ in pairs if curve for point in curve.points]
            counted = all(operations_share(point.record) is not None for point in points)
            remark = "" if counted else " (operations not counted)"
            found.append(f"{label} from size {max(size for size in sizes if size is not None)}{remark}")
    names = ", ".join(found) or "nothing measured here"
    return f"Below uniform attention on every input, with fewer operations than exact: {names}."
