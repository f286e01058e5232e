"""Models with their attention swapped, in sentences."""

from collections.abc import Sequence

from efficient_attn.runner.records import Record
from efficient_attn.runner.sizes import MEAN_OF_VALUES, OWN
from efficient_attn.stats.candidates import missing, not_measured, operations_sentence
from efficient_attn.stats.noise_warnings import IDLE, disturbance
from efficient_attn.studies.swap.analysis import Swap, SwapRow, swaps
from efficient_attn.studies.swap.tables import NAMES, show_quantity, speed
from efficient_attn.studies.view import Environment


def sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """The nearest backend to each model, and backends that save no operations."""
    found = []
    for one in swaps(records):
        found += [_nearest(one, environment), operations_sentence(one.records)]
    return [sentence for sentence in found if sentence]


def _nearest(one: Swap, environment: Environment) -> str:
    near = [(mean, row) for mean, row in one.changed if row.backend not in (OWN, MEAN_OF_VALUES)]
    left = not_measured(environment, {row.label for row in one.rows if row.whole is not None or row.failed})
    if not near:
        return missing(left, environment).strip()
    value, row = near[0]
    plainest = next((mean for mean, other in one.changed if other.backend == MEAN_OF_VALUES), float("inf"))
    worse = [other.label for mean, other in near if mean >= plainest]
    no_nearer = f" No nearer than the mean of the values: {', '.join(worse)}." if worse else ""
    return (
        f"With all its attention swapped, {one.case.inputs} stays nearest to itself with {row.label}"
        f"{' among the candidates measured so far' if left else ''}: {NAMES[one.quantity]} "
        f"{show_quantity(one.quantity, value)}{_speed(one, row, environment)}.{no_nearer}"
        f"{missing(left, environment)}"
    )


def _speed(one: Swap, row: SwapRow, environment: Environment) -> str:
    """The speed-up of the model, unless the load or the intervals of both times leave it open."""
    found = row.speed(one.own)
    if found is None:
        return ""
    load = disturbance(one.records, environment)
    if load is not None:
        return f"; how fast, the times do not show now: {load}; {IDLE}"
    unclear = "" if found.side_of_one else ", which leaves open whether it is faster"
    return f", {speed(one, row)} as fast as before{unclear}"
