"""Figure 2 of Choromanski et al. 2021: where positive features have the smaller error."""

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache, partial
from statistics import fmean

import numpy as np

from efficient_attn.report.table import Table
from efficient_attn.runner.record import Case, Record
from efficient_attn.runner.worker import answer
from efficient_attn.studies.plan import Plan, Point
from efficient_attn.studies.reproduce.figures import Setting
from efficient_attn.studies.reproduce.figures.performer_fig2 import claims, plot
from efficient_attn.studies.reproduce.figures.performer_fig2.claims import (
    KINDS,
    POSITIVE,
    TRUSTED,
    Place,
    errors,
    place_of,
    utilities,
)
from efficient_attn.theory.kernel import (
    log_mean_squared_error,
    log_positive_error,
    log_trigonometric_error,
    log_utility,
)

TITLE = "Figure 2: the utility r = MSE_trig / MSE_+ by angle and length"
PAPER = "Choromanski et al. 2021, Rethinking Attention with Performers, https://arxiv.org/abs/2009.14794"

findings, draw = claims.findings, plot.draw

_NORMS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
_ANGLES = (0, 30, 60, 75, 90, 100, 110, 120, 135, 150, 165, 175, 180)
_QUICK_NORMS, _QUICK_ANGLES = (0.5, 1.0), (0, 60, 90, 120, 150, 180)

# The errors of independent directions do not depend on the dimension; the figure 4 of the paper has this one.
_HEAD_DIM = 16
_BLOCKS, _DIRECTIONS, _QUICK_DIRECTIONS = 20, 50_000, 2_000


def plan(setting: Setting) -> Plan:
    """The mean squared error of one direction at every pair, norm by norm, in float64."""
    norms, angles = (_QUICK_NORMS, _QUICK_ANGLES) if setting.quick else (_NORMS, _ANGLES)
    block = _QUICK_DIRECTIONS if setting.quick else _DIRECTIONS
    points = []
    for norm in norms:
        places = tuple(Place(norm, float(angle)) for angle in angles)
        for place, name in itertools.product(places, KINDS):
            case = case_of(place, name, block, setting.threads)
            measure = partial(answer, case, partial(_measured, case, places, block))
            # The first point of a norm draws the directions of all.
            first = (place, name) == (places[0], next(iter(KINDS)))
            label = f"{name}, length {norm:g}, {place.angle:g}°"
            points.append(Point(case=case, measure=measure, label=label, series=first))
    return Plan(points=points)


def tables(records: Sequence[Record]) -> list[Table]:
    """r by length and angle, measured and in closed form."""
    found = utilities(records)
    places = sorted(errors(records, POSITIVE))
    angles = sorted({place.angle for place in places if 0 < place.angle < 180})

    def cell(place: Place) -> str:
        closed = f"({_short(math.exp(log_utility(place.norm, math.radians(place.angle))))})"
        return f"{_short(found[place].value)} {closed}" if place in found else f"– {closed}"

    body = tuple(
        (f"l = {norm:g}", *(cell(Place(norm, angle)) for angle in angles))
        for norm in sorted({place.norm for place in places})
    )
    notes = (
        "Each cell: measured (closed form). r above 1: positive features are better with as many directions, "
        "above 1/2 with as many features.",
        "At 90° r is (1 − exp(−2 l²)) / 2, below 1/2 at every length.",
        f"– cannot be measured by drawing directions: the predicted standard error of positive features is "
        f"above {TRUSTED:.0%}, and a typical run would be far too low.",
    )
    drawn = {
        f"{one.case.options['directions']} directions in {_BLOCKS} blocks, head_dim {one.case.head_dim}, "
        f"{one.case.dtype}; no head_dim enters these errors."
        for one in records
    }
    columns = ("length", *(f"{angle:g}°" for angle in angles))
    return [Table(TITLE, columns, body, (*notes, *drawn))]


def case_of(place: Place, backend: str, block: int, threads: int) -> Case:
    """The case of a pair and a map."""
    return Case(
        kind="error",
        backend=backend,
        label=backend,
        options={"projection": "iid", "directions": block * _BLOCKS},
        of="kernel",
        num_heads=1,
        head_dim=_HEAD_DIM,
        tokens=1,
        dtype="float64",
        device="cpu",
        threads=threads,
        inputs=place.inputs,
    )


def expected(place: Place, backend: str) -> float:
    """The closed form of the error."""
    if backend == POSITIVE:
        log_error = log_positive_error(place.sum_square)
    else:
        log_error = log_trigonometric_error(place.difference_square)
    product = place.norm**2 * math.cos(math.radians(place.angle))
    return float(np.exp(log_mean_squared_error(log_error, product)))


def _measured(case: Case, places: tuple[Place, ...], block: int) -> Record:
    """The error at one pair, a mean for each block of directions."""
    place = place_of(case)
    found = _draws(places, block)[place, case.backend]
    return Record(
        case=case,
        num_directions=1,
        expected_kernel_mse=expected(place, case.backend),
        kernel_mse=fmean(found),
        kernel_mse_draws=found,
    )


@lru_cache(maxsize=1)
def _draws(places: tuple[Place, ...], block: int) -> dict[tuple[Place, str], tuple[float, ...]]:
    """The errors at all pairs by both maps, a mean for each block of directions."""
    import torch

    from efficient_attn.ops.linear.directions import draw_directions
    from efficient_attn.ops.linear.features import MAPS

    turn = torch.tensor([math.radians(place.angle) for place in places], dtype=torch.float64)
    norms = torch.tensor([place.norm for place in places], dtype=torch.float64)
    x, y = torch.zeros(2, len(places), _HEAD_DIM, dtype=torch.float64)
    x[:, 0], y[:, 0], y[:, 1] = norms, norms * turn.cos(), norms * turn.sin()
    exact = (x * y).sum(dim=-1, keepdim=True).exp()
    draws: dict[tuple[Place, str], list[float]] = {}
    for seed in range(_BLOCKS):
        directions = draw_directions("iid", block, _HEAD_DIM, seed=seed)
        for name, kind in KINDS.items():
            one, other = (MAPS[kind].features(vectors, directions) for vectors in (x, y))
            estimates = (one.log_scale + other.log_scale).exp()
            if one.values is not None and other.values is not None:
                products = (one.values * other.values).unflatten(-1, (2, block)).sum(dim=-2)
                estimates = estimates * products
            # The map divides by the number of directions; each alone is an estimate.
            errors = (block * estimates - exact).square().mean(dim=-1)
            for place, error in zip(places, errors.tolist(), strict=True):
                draws.setdefault((place, name), []).append(error)
    return {key: tuple(found) for key, found in draws.items()}


def _short(value: float) -> str:
    return f"{value:.2g}" if value < 100 else f"{value:.3g}"
