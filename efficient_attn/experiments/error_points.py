"""What `mse` is going to measure: every record to come, known before anything runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efficient_attn.contained import contained, described
from efficient_attn.errors import AttentionError, UnsupportedError
from efficient_attn.sweep.amounts import parse_sizes
from efficient_attn.sweep.questions import Question
from efficient_attn.sweep.sizes import SEED, possible
from efficient_attn.sweep.variants import Variant, select


@dataclass(frozen=True, kw_only=True)
class Point:
    """One record to come: a variant, or a yardstick, on a subject at a size."""

    subject: Any
    variant: Variant
    yardstick: Any = None
    option: str | None = None
    size: int | None = None
    match: Any = None
    refusal: str | None = None

    @property
    def label(self) -> str:
        """What a progress display says."""
        return f"{self.variant.label}{'' if self.size is None else f' {self.size}'} on {self.subject.name}"


def plan_mse(
    backends: Sequence[Any] | None,
    question: Question,
    *,
    sizes: str | Sequence[int],
    inputs: str | Path | Sequence[str | Path],
    norms: Sequence[float],
    angles: Sequence[float],
    tokens: int,
    head_dim: int,
    layers: Sequence[int] | None,
    data_seeds: int,
    options: Mapping[str, Mapping[str, Sequence[Any]]] | None,
    seed: int,
) -> tuple[Point, ...]:
    """Every record to come, input by input, the yardsticks of an input first."""
    wanted = parse_sizes(sizes, name="sizes")
    variants = select(backends, options)
    if question.of == "kernel":
        variants = tuple(variant for variant in variants if backends is not None or SEED in variant.options)

    from efficient_attn.sweep.accuracy import try_options
    from efficient_attn.sweep.subjects import pair_subjects, subjects

    listed = [inputs] if isinstance(inputs, (str, Path)) else list(inputs)
    if question.of == "kernel":
        chosen = pair_subjects(norms, angles, head_dim=head_dim, seed=seed)
    else:
        chosen = subjects(
            listed,
            norms=norms,
            tokens=tokens,
            head_dim=head_dim,
            layers=layers,
            seed=seed,
            data_seeds=data_seeds,
        )
    for variant in variants:
        for point in _points(chosen[0], variant, wanted[:1], "features"):
            try_options(variant, chosen[0], option=point.option, size=point.size)
    return tuple(
        point
        for subject in chosen
        for point in (
            *_yardsticks(subject, question, wanted),
            *(point for variant in variants for point in _points(subject, variant, wanted, question.match)),
        )
    )


def _yardsticks(subject: Any, question: Question, sizes: Sequence[int]) -> list[Point]:
    """The mean of the values first; no row of the others' weights lacks a positive sum."""
    from efficient_attn.sweep import yardsticks as make

    if question.of == "kernel":
        # What a kernel entry is read beside follows from its norm and angle alone.
        return []
    made = [make.mean_of_values()]
    if question.metrics != ("unsafe",):
        made += [make.taylor(order, subject.head_dim) for order in make.TAYLOR_ORDERS]
        made += [make.oracle(rank) for rank in make.ranks_of(sizes, subject.tokens)]
    return [Point(subject=subject, variant=one.variant, yardstick=one, size=one.rank) for one in made]


def _points(subject: Any, variant: Variant, sizes: Sequence[int], match: str) -> list[Point]:
    """The sizes of a variant; one point where it has none, or where its size was set as an option."""
    from efficient_attn.backends import resolve

    option = resolve(variant.target).size_option
    if option is None or f"{option}=" in variant.label:
        return [Point(subject=subject, variant=variant)]
    if match != "features":
        return _matched_points(subject, variant, option, sizes, match)
    return [
        Point(subject=subject, variant=variant, option=option, size=size)
        for size in sizes
        if possible(size, tokens=subject.tokens, options=variant.options)
    ]


def _matched_points(
    subject: Any, variant: Variant, option: str, sizes: Sequence[int], quantity: str
) -> list[Point]:
    """The sizes of a variant at which it takes as much as the reference does at these."""
    from efficient_attn.sweep.match import matched

    try:
        with contained():
            found = matched(variant, subject, option, sizes, quantity)
    except UnsupportedError as refusal:
        return [Point(subject=subject, variant=variant, refusal=str(refusal))]
    except AttentionError:
        raise
    except Exception as failure:  # The backend may be anybody's code.
        return [Point(subject=subject, variant=variant, refusal=described(failure))]
    return [Point(subject=subject, variant=variant, option=option, size=one.size, match=one) for one in found]
