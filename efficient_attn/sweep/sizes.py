"""The size of an approximation: features, rank or window, and how it stands in labels and records."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from efficient_attn.sweep.records import Case
from efficient_attn.sweep.variants import Variant

# What records call the yardstick of every error: each query gets the mean of the values.
MEAN_OF_VALUES = "mean of V"

# The attention that a model came with, which backends are swapped for.
OWN = "the model's own"

# Further yardsticks: the nearest matrix of each rank to the exact weights, and the Taylor series of exp.
ORACLE, TAYLOR = "rank-r SVD", "Taylor"
YARDSTICKS = (MEAN_OF_VALUES, ORACLE, TAYLOR)

# An option of this name makes a backend a random draw.
SEED = "seed"


class Sized(NamedTuple):
    """A label without its size, and the size; None where the backend has none."""

    series: str
    size: int | None


def with_size(variant: Variant, option: str, size: int) -> Variant:
    """The variant with its size set, labelled `name(option=size)`, the size last."""
    name, inner = _split(variant.label)
    label = f"{name}({', '.join([*inner, f'{option}={size}'])})"
    return replace(variant, label=label, options={**variant.options, option: size})


def sized(case: Case) -> Sized:
    """What a label says: `performer-positive(projection=iid, num_features=64)` has size 64."""
    name, inner = _split(case.label)
    for item in reversed(inner):
        option, _, value = item.partition("=")
        if option != SEED and option in case.options and re.fullmatch(r"\d+", value):
            rest = [other for other in inner if other != item]
            return Sized(f"{name}({', '.join(rest)})" if rest else name, int(value))
    return Sized(case.label, None)


def possible(size: int, *, tokens: int, options: Mapping[str, Any]) -> bool:
    """Whether a size makes sense: ranks and windows count tokens, random features do not."""
    return SEED in options or size <= tokens


def _split(label: str) -> tuple[str, list[str]]:
    """`name(a=1, b=2)` as name and items; a label without items as it is."""
    found = re.fullmatch(r"(.*?)\((.*)\)", label)
    return (found[1], found[2].split(", ")) if found else (label, [])
