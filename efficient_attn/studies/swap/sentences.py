"""Models with their attention swapped, in sentences."""

from collections.abc import Sequence

from efficient_attn.report.candidates import missing, operations_sentence
from efficient_attn.runner.records import Record
from efficient_attn.runner.sizes import MEAN_OF_VALUES, OWN
from efficient_attn.stats.candidates import not_measured
from efficient_attn.stats.noise_warnings import IDLE, disturbance
from efficient_attn.studies.swap.analysis import Swap, SwapRow, spread, swaps
from efficient_attn.studies.swap.tables import NAMES, show_quantity, speed
from efficient_attn.studies.view import Environment


def sentences(records: Sequence[Record], environment: Environment | None = None) -> list[str]:
    """The nearest backend to each model, the layer that bears the swap least, and who saves no operations.

    Args:
        environment: Environment of the run: its candidates, measured or not, and noise warnings.
    """
    told = []
    for one in swaps(records):
        told += [_nearest(one, environment), *_weakest(one), operations_sentence(one.records)]
    return [sentence for sentence in told if sentence]


def _approximations(one: Swap) -> list[tuple[float, SwapRow]]:
    """Approximations, the nearest first."""
    found = [
        (value.mean, row)
        for row in one.rows
        if row.backend not in (OWN, MEAN_OF_VALUES) and (value := row.spread(one.quantity)) is not None
    ]
    return sorted((pair for pair in found if pair[0] > one.rounding), key=lambda pair: pair[0])


def _nearest(one: Swap, environment: Environment | None) -> str:
    near = _approximations(one)
    left = not_measured(environment, {row.label for row in one.rows if row.whole is not None or row.failed})
    if not near:
        return missing(left, environment).strip()
    value, row = near[0]
    name = f"{NAMES[one.quantity]} {show_quantity(one.quantity, value)}"
    fast = _speed_told(one, row, environment)
    plainest = next((r.spread(one.quantity) for r in one.rows if r.backend == MEAN_OF_VALUES), None)
    worse = [r.label for mean, r in near if plainest is not None and mean >= plainest.mean]
    said = f" No nearer than the mean of the values: {', '.join(worse)}." if worse else ""
    place = f"With all its attention swapped, {one.case.inputs} stays nearest to itself with {row.label}"
    tried = " among the candidates measured so far" if left else ""
    return f"{place}{tried}: {name}{fast}.{said}{missing(left, environment)}"


def _speed_told(one: Swap, row: SwapRow, environment: Environment | None) -> str:
    """How much faster the model became, unless the load or the intervals of both times leave it open."""
    found = row.speed(one.own)
    if found is None:
        return ""
    load = disturbance(one.records, environment)
    if load is not None:
        return f"; how fast, the times do not show now: {load}; {IDLE}"
    told = f", {speed(one, row)} as fast as before"
    return told if found.side_of_one else f"{told}, which leaves open whether it is faster"


def _weakest(one: Swap) -> list[str]:
    """For the nearest approximation the layer that bears it least."""
    near = [row for _, row in _approximations(one) if row.alone]
    if not near:
        return []
    row = near[0]
    parts = {
        layer: part.mean
        for layer, record in row.alone.items()
        if (part := spread(record, one.quantity)) is not None
    }
    if len(parts) < 2:
        return []
    worst, best = max(parts, key=lambda layer: parts[layer]), min(parts, key=lambda layer: parts[layer])
    return [
        f"{row.label} alone costs most in layer {worst} ({NAMES[one.quantity]} "
        f"{show_quantity(one.quantity, parts[worst])}) and least in layer {best} "
        f"({show_quantity(one.quantity, parts[best])})."
    ]
