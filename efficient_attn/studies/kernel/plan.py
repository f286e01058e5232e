"""Plan of kernel entries: pairs of a query and a key with a norm and an angle, size by size."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from efficient_attn.errors import OptionError
from efficient_attn.options import SEED
from efficient_attn.problem import positive_count
from efficient_attn.runner.sizes import sized
from efficient_attn.runner.units import parse_sizes
from efficient_attn.runner.variants import Variant, select
from efficient_attn.studies import options as shared
from efficient_attn.studies.points import Plan, Point, in_lists, interleaved
from efficient_attn.studies.workload import Workload, settle

# Kernel entries are cheap and need many draws.
DRAWS = 64


def plan(
    backends: shared.Backends = None,
    *,
    sizes: shared.Sizes = (16, 32, 64, 128, 256, 512, 1024),
    norms: shared.Norms = (0.5, 1.0),
    angles: shared.Angles = (60.0, 90.0, 120.0),
    draws: shared.Draws = DRAWS,
    head_dim: shared.HeadDim = 16,
    options: shared.Settings = None,
    exclude: shared.Exclude = None,
    threads: shared.Threads = None,
    seed: shared.Seed = 0,
) -> Plan:
    """Measure the error of random features at entries of the softmax kernel, compared with theory.

    An entry is exp(x·y) for x = q/d^¼ and y = k/d^¼ of a given norm and angle, in float64.

    Example: efficient-attn kernel --norm 0.5,1 --angle 60,90,120
    """
    wanted = parse_sizes(sizes, name="sizes")
    positive_count("draws", draws)
    variants = select(backends, options, exclude=exclude)
    variants = tuple(one for one in variants if backends is not None or SEED in one.options)
    threads = settle(Workload(device="cpu", threads=threads)).threads
    lists = [
        interleaved(_line(subject, variant, wanted, draws, threads) for variant in variants)
        for subject in _subjects(norms, angles, head_dim=head_dim, seed=seed)
    ]
    return Plan(steps=partial(in_lists, lists))


def _subjects(norms: Sequence[float], angles: Sequence[float], *, head_dim: int, seed: int) -> list[Any]:
    """Pairs of a query and a key, one subject for each norm and angle of their scaled vectors."""
    from efficient_attn.runner.inputs import Subject
    from efficient_attn.studies.kernel.measure import pairs

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


def _line(
    subject: Any, variant: Variant, sizes: Sequence[int], draws: int, threads: int | None
) -> Iterator[Point]:
    """The points of a variant, by rising size."""
    from efficient_attn.runner.accuracy import at_sizes, error_case
    from efficient_attn.studies.kernel.measure import measure

    for one in at_sizes(variant, subject, sizes):
        case = error_case(one, subject, "kernel", threads=threads)
        yield Point(
            case=case,
            measure=partial(measure, one, subject, draws, threads=threads),
            label=f"{case.label} at {case.inputs}",
            series=sized(case).series,
            cost=float(draws * (sized(case).size or 1)),
        )
