"""Error of the softmax kernel at single pairs: measured over draws, and predicted by theory."""

import math
from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Generator

from efficient_attn.errors import OptionError
from efficient_attn.measure.accuracy import error_case, measure_draws
from efficient_attn.measure.calls import attention_flops
from efficient_attn.measure.inputs import Activations, NamedInputs
from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.variants import Variant, sized
from efficient_attn.ops.linear.features import haar_rotations
from efficient_attn.problem import positive_count
from efficient_attn.runs.study import Point
from efficient_attn.theory.kernel import (
    ERRORS,
    log_fixed_norm_error,
    log_oprf_error,
    log_orthogonal_error,
    rare_error,
)

# Draws of kernel entries, which are cheap and scatter; pairs of one norm and angle, in random directions.
DRAWS, PAIRS = 64, 64
# Numbers of features.
SIZES = (64, 256)

# Rare directions that give an error a larger relative standard error are mostly missed: it comes out too low.
_MOST_UNCERTAIN = 0.2


def pairs(*, norm: float, angle: float, head_dim: int, seed: int) -> NamedInputs:
    """q and k, float64 [1 1 pairs head_dim], whose scaled vectors have this norm and angle in degrees.

    x = q/head_dim^¼ and y = k/head_dim^¼, so that exp(x·y) is the softmax kernel at 1/√head_dim.
    """
    positive_count("head_dim", head_dim)
    if not 0 <= angle <= 180:
        raise OptionError(f"angle is from 0 to 180 degrees, not {angle!r}.")
    generator = Generator().manual_seed(int(np.random.SeedSequence((seed, 2)).generate_state(1)[0]))
    basis = haar_rotations(PAIRS, max(head_dim, 2), generator)[..., :head_dim]
    turn = math.radians(angle)
    x, y = basis[:, 0], math.cos(turn) * basis[:, 0] + math.sin(turn) * basis[:, 1]
    q, k = (norm * head_dim**0.25 * rows[None, None] for rows in (x, y))
    name = f"pair(norm={norm:g}, angle={angle:g})"
    return NamedInputs(name, Activations(q, k, k), head_dim**-0.5, seed)


def entry_point(variant: Variant, subject: NamedInputs, *, draws: int, threads: int | None = None) -> Point:
    """Error of kernel entries at the pairs of a subject."""
    case = error_case(variant, subject, "kernel", threads=threads)
    return Point(
        case=case,
        measure=partial(_measure, variant, subject, draws, threads),
        label=f"{case.label} at {case.inputs}",
        series=sized(case).series,
        cost=float(draws * (sized(case).size or 1)),
    )


def _measure(variant: Variant, subject: NamedInputs, draws: int, threads: int | None) -> Record:
    """Mean error over draws, or the reason why the draws are too few."""
    q, k, _ = subject.activations

    def measured(case: Case, backends: Sequence[Any]) -> Record:
        value = float(torch.exp(subject.scale * (q * k).sum(dim=-1)).mean())
        expected, uncertainty = _theory(backends[0], q, k, draws)
        shared: dict[str, Any] = {
            "kernel_value": value,
            "expected_kernel_mse": None if expected is None else expected * value**2,
            "flops": attention_flops(case, variant.target),
        }
        if uncertainty > _MOST_UNCERTAIN:
            reason = f"{draws} draws are too few here"
            return Record(case=case, status="skipped", reason=reason, **shared)
        ratios = [backend.kernel_ratios(q, k) for backend in backends]
        errors = tuple(float((ratio - 1).square().mean()) * value**2 for ratio in ratios)
        return Record(case=case, kernel_mse=fmean(errors), kernel_mse_draws=errors, **shared)

    return measure_draws(variant, subject, "kernel", draws, measured, threads=threads)


def _theory(backend: Any, q: torch.Tensor, k: torch.Tensor, draws: int) -> tuple[float | None, float]:
    """Theoretical error over SM² if known, and relative standard error from rare directions."""
    features = getattr(backend.core, "features", None)
    random = getattr(features, "random", features)
    projection = getattr(backend.options, "projection", None)
    if random is None or projection is None or random.kind not in ERRORS:
        return None, 0.0
    x, y = (rows.numpy().astype(np.float64)[0, 0] for rows in backend.kernel_rows(q, k))
    z = x + y
    square = ((x - y if random.kind == "trigonometric" else z) ** 2).sum(axis=1)
    m, curvatures = len(random.projection), getattr(features, "curvatures", None)
    a = None if curvatures is None else curvatures[0].double().numpy()
    single = ERRORS[random.kind](square) if a is None else log_oprf_error(z, a=a)
    # Cosines are bounded.
    bounded = random.kind == "trigonometric"
    rare = 0.0 if bounded else float(rare_error(single.mean(), samples=m * draws))
    if random.norms == "fixed":
        if a is not None or projection not in ("iid", "orthogonal"):
            return None, rare
        fixed = {"kind": random.kind, "num_directions": m, "head_dim": z.shape[1]}
        return float(np.exp(log_fixed_norm_error(square, projection=projection, **fixed)).mean()), rare
    if projection == "iid":
        return float(np.exp(single).mean()) / m, rare
    if projection != "orthogonal" or (a is not None and np.ptp(a) > 0):
        # Coupled directions have a closed form only for equal a along all axes.
        return None, rare
    coupled = {"kind": random.kind, "head_dim": z.shape[1], "log_single": single}
    return float(np.exp(log_orthogonal_error(square, num_directions=m, **coupled)).mean()), rare
