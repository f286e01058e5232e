"""Error of the softmax kernel at single pairs: measured over draws, and predicted by theory."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from efficient_attn.errors import OptionError
from efficient_attn.measure.accuracy import at_sizes, directions_of, error_case, measure_draws
from efficient_attn.measure.calls import attention_flops
from efficient_attn.measure.inputs import Activations, Subject
from efficient_attn.measure.record import Case, Record, replace
from efficient_attn.measure.variants import Variant, sized
from efficient_attn.ops.linear.features import haar_rotations
from efficient_attn.problem import positive_count
from efficient_attn.studies.study import Point
from efficient_attn.theory import kernel
from efficient_attn.theory.kernel import Floats, log_coupled_error, log_oprf_error, standard_error

# Pairs of one norm and angle, in random directions, per draw.
PAIRS = 64

# Rare directions that give an error a larger relative standard error are mostly missed: it comes out too low.
_MOST_UNCERTAIN = 0.2

# Features whose error theory predicts.
_KINDS = ("positive", "hyperbolic", "trigonometric")


# Draws of kernel entries, which are cheap and scatter.
DRAWS = 64


def pair_subjects(
    norms: Sequence[float], angles: Sequence[float], *, head_dim: int, seed: int
) -> list[Subject]:
    """Pairs of a query and a key, one subject for each norm and angle of their scaled vectors."""
    if not norms or not angles:
        raise OptionError("norms and angles must not be empty.")
    for angle in angles:
        if not 0 <= angle <= 180:
            raise OptionError(f"angle is from 0 to 180 degrees, not {angle!r}.")
    return [
        Subject(
            f"pair(norm={norm:g}, angle={angle:g})",
            pairs(norm=norm, angle=angle, head_dim=head_dim, seed=seed),
            head_dim**-0.5,
            seed,
        )
        for norm in norms
        for angle in angles
    ]


def entry_points(
    subject: Subject, variant: Variant, sizes: Sequence[int], draws: int, threads: int | None
) -> Iterator[Point]:
    """The points of a variant, by rising size."""
    for sized_variant in at_sizes(variant, subject, sizes):
        case = error_case(sized_variant, subject, "kernel", threads=threads)
        yield Point(
            case=case,
            measure=partial(measure, sized_variant, subject, draws, threads=threads),
            label=f"{case.label} at {case.inputs}",
            series=sized(case).series,
            cost=float(draws * (sized(case).size or 1)),
        )


def pairs(*, norm: float, angle: float, head_dim: int, seed: int) -> Activations:
    """q and k, float64 [1 1 pairs head_dim], whose scaled vectors have this norm and angle.

    x = q/head_dim^¼ and y = k/head_dim^¼, so that exp(x·y) is the softmax kernel at 1/√head_dim.

    Args:
        norm: |x| = |y|.
        angle: Angle between x and y in degrees.
    """
    positive_count("head_dim", head_dim)
    generator = Generator().manual_seed(int(np.random.SeedSequence((seed, 2)).generate_state(1)[0]))
    basis = haar_rotations(PAIRS, max(head_dim, 2), generator)[..., :head_dim]
    turn = math.radians(angle)
    x, y = basis[:, 0], math.cos(turn) * basis[:, 0] + math.sin(turn) * basis[:, 1]
    q, k = (norm * head_dim**0.25 * rows[None, None] for rows in (x, y))
    return Activations(q, k, k)


def measure(variant: Variant, subject: Subject, draws: int, *, threads: int | None = None) -> Record:
    """Mean error over draws, or the reason why the draws are too few."""
    q, k, _ = subject.activations

    def measured(case: Case, backends: Sequence[Any]) -> Record:
        record = _measured(case, backends, q, k, subject.scale)
        return replace(
            record,
            num_directions=directions_of(backends[0]),
            flops=attention_flops(case, variant.target),
        )

    return measure_draws(variant, subject, "kernel", draws, measured, threads=threads)


def _measured(case: Case, backends: Sequence[Any], q: Tensor, k: Tensor, scale: float) -> Record:
    value = float(torch.exp(scale * (q * k).sum(dim=-1)).mean())
    expected, uncertainty = _expected(backends[0], q, k, len(backends))
    expected_mse = None if expected is None else expected * value**2
    if uncertainty > _MOST_UNCERTAIN:
        reason = f"too few draws ({len(backends)}) for a heavy-tailed estimate; theory shown instead"
        return Record(
            case=case, status="skipped", reason=reason, expected_kernel_mse=expected_mse, kernel_value=value
        )
    ratios = [backend.kernel_ratios(q, k) for backend in backends]
    errors = tuple(float((ratio - 1).square().mean()) * value**2 for ratio in ratios)
    return Record(
        case=case,
        kernel_mse=fmean(errors),
        kernel_mse_draws=errors,
        expected_kernel_mse=expected_mse,
        kernel_value=value,
    )


def _expected(backend: Any, q: Tensor, k: Tensor, draws: int) -> tuple[float | None, float]:
    """Theoretical error over SM², None without a closed form; and the part of the relative standard error
    over draws that comes from rare directions, which normal estimates do not have.
    """
    core = backend.core
    random = getattr(getattr(core, "features", None), "random", getattr(core, "features", None))
    projection = getattr(backend.options, "projection", None)
    if random is None or projection is None or random.kind not in _KINDS:
        return None, 0.0
    x, y = (rows.numpy().astype(np.float64)[0, 0] for rows in backend.kernel_rows(q, k))
    sums, differences = ((x + y) ** 2).sum(axis=1), ((x - y) ** 2).sum(axis=1)
    m, curvatures = len(random.projection), getattr(core.features, "curvatures", None)
    a = None if curvatures is None else curvatures[0].double().numpy()
    uncertainty = standard_error(
        random.kind, float(sums.mean()), float(differences.mean()), a=a, num_directions=m, draws=draws
    )
    logs = _log_errors(random.kind, projection, x, y, m, a)
    rare = math.sqrt(max(uncertainty**2 - 2 / draws, 0.0))
    return (None if logs is None else float(np.exp(logs).mean())), rare


def _log_errors(kind: str, projection: str, x: Floats, y: Floats, m: int, a: Floats | None) -> Floats | None:
    """log of the error over SM² of each pair."""
    square = ((x - y if kind == "trigonometric" else x + y) ** 2).sum(axis=1)
    if a is None and projection == "iid":
        return np.asarray(getattr(kernel, f"log_{kind}_error")(square, num_directions=m))
    if a is not None and projection == "iid":
        return log_oprf_error(x + y, a=a, num_directions=m)
    if a is not None and np.ptp(a) > 0:
        # Coupled directions have a closed form only for equal a along all axes.
        return None
    return log_coupled_error(
        square,
        kind=kind,
        projection=projection,
        num_directions=m,
        head_dim=x.shape[1],
        log_single=None if a is None else log_oprf_error(x + y, a=a),
    )
