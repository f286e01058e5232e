"""Figure 2 of Choromanski et al. 2021: where positive features have the smaller error."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from efficient_attn.analysis.verdicts import not_measured
from efficient_attn.experiments.reproduce import _fig2_claims as claims
from efficient_attn.experiments.reproduce import _fig2_plot
from efficient_attn.experiments.reproduce._fig2 import (
    KINDS,
    POSITIVE,
    TRUSTED,
    Place,
    errors,
    place_of,
    predicted_error,
    trusted,
    utilities,
)
from efficient_attn.experiments.reproduce._parts import Part, measure_parts
from efficient_attn.experiments.reproduction import Setting
from efficient_attn.report.table import Table
from efficient_attn.sweep.case import Case, Record, replace
from efficient_attn.sweep.run import Step
from efficient_attn.theory.kernel import (
    log_mean_squared_error,
    log_positive_error,
    log_trigonometric_error,
    log_utility,
)

TITLE = "Figure 2: the utility r = MSE_trig / MSE_+ by angle and length"
PAPER = "Choromanski et al. 2021, Rethinking Attention with Performers, https://arxiv.org/abs/2009.14794"

findings, draw = claims.findings, _fig2_plot.draw

_NORMS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
_ANGLES = (0, 30, 60, 75, 90, 100, 110, 120, 135, 150, 165, 175, 180)
_QUICK_NORMS, _QUICK_ANGLES = (0.5, 1.0), (0, 60, 90, 120, 150, 180)

# The errors of independent directions do not depend on the dimension; the figure 4 of the paper has this one.
_HEAD_DIM = 16
_BLOCKS, _DIRECTIONS, _QUICK_DIRECTIONS = 20, 50_000, 2_000


def measure(
    setting: Setting, *, emit: Callable[[Record], None], progress: Callable[[Step], None] | None
) -> bool:
    """The mean squared error of one direction at every pair, norm by norm, in float64."""
    norms, angles = (_QUICK_NORMS, _QUICK_ANGLES) if setting.quick else (_NORMS, _ANGLES)
    block = _QUICK_DIRECTIONS if setting.quick else _DIRECTIONS
    parts = []
    for norm in norms:
        places = [Place(norm, float(angle)) for angle in angles]
        empty = [_record(place, name, block, setting.threads) for place in places for name in KINDS]
        parts.append(Part(f"length {norm:g}", partial(_measured, empty, block), empty))
    return measure_parts(parts, setting, emit=emit, progress=progress)


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One row per pair and feature map, with the closed form and its standard error."""
    made = []
    for record in records:
        place, backend = place_of(record.case), record.case.backend
        directions = int(record.case.options["directions"])
        made.append(
            {
                "norm": place.norm,
                "angle_degrees": place.angle,
                "backend": backend,
                "sum_square": place.sum_square,
                "difference_square": place.difference_square,
                "kernel_mse_of_one_direction": record.kernel_mse,
                "closed_form": record.expected_kernel_mse,
                "predicted_relative_standard_error": predicted_error(place, backend, directions),
                "directions": directions,
                "trusted": trusted(place, directions),
                "not_measured": record.reason,
            }
        )
    return made


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
    return [Table(TITLE, columns, body, (*notes, *drawn, *not_measured(records)))]


def _record(place: Place, backend: str, block: int, threads: int) -> Record:
    """The record of a pair before it is measured, with the theoretical error."""
    if backend == POSITIVE:
        log_error = log_positive_error(place.sum_square)
    else:
        log_error = log_trigonometric_error(place.difference_square)
    product = place.norm**2 * math.cos(math.radians(place.angle))
    case = Case(
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
    expected = float(np.exp(log_mean_squared_error(log_error, product)))
    return Record(case=case, num_directions=1, expected_kernel_mse=expected)


def _measured(empty: Sequence[Record], block: int) -> Iterator[Record]:
    """The records with their errors, a mean for each block of directions."""
    import torch

    from efficient_attn.ops.linear.directions import draw_directions
    from efficient_attn.ops.linear.features import MAPS

    places = list(dict.fromkeys(place_of(record.case) for record in empty))
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
    for record in empty:
        found = draws[place_of(record.case), record.case.backend]
        yield replace(record, kernel_mse=fmean(found), kernel_mse_draws=tuple(found))


def _short(value: float) -> str:
    return f"{value:.2g}" if value < 100 else f"{value:.3g}"
