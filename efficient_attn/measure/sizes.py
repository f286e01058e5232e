"""The size of an approximation (features, rank or window) in labels and records."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from efficient_attn.measure.records import Case
from efficient_attn.measure.variants import Variant
from efficient_attn.options import SEED

# Label of the uniform-attention baseline: each query gets the mean of the values.
MEAN_OF_VALUES = "mean of V"

# Subject of cases of a whole model, and label of its original attention.
MODEL, OWN = "model", "the model's own"

# Backend and label of a plan: a backend for each layer of a model.
PLAN = "plan"


class Sized(NamedTuple):
    """A label without its size, and the size; None if the backend has none."""

    series: str
    size: int | None


def with_size(variant: Variant, option: str, size: int) -> Variant:
    """The variant with its size set, labelled `name(option=size)`, the size last."""
    name, inner = _split(variant.label)
    label = f"{name}({', '.join([*inner, f'{option}={size}'])})"
    return replace(variant, label=label, options={**variant.options, option: size})


def sized(case: Case) -> Sized:
    """Parse a label: `performer-positive(projection=iid, num_features=64)` has size 64."""
    name, inner = _split(case.label)
    for item in reversed(inner):
        option, _, value = item.partition("=")
        if option != SEED and option in case.options and re.fullmatch(r"\d+", value):
            rest = [other for other in inner if other != item]
            return Sized(f"{name}({', '.join(rest)})" if rest else name, int(value))
    return Sized(case.label, None)


def possible(size: int, *, tokens: int, options: Mapping[str, Any]) -> bool:
    """Whether a size is valid: ranks and windows are at most the tokens, random features are not limited."""
    return SEED in options or size <= tokens


def _split(label: str) -> tuple[str, list[str]]:
    """`name(a=1, b=2)` as name and items; a label without items unchanged."""
    found = re.fullmatch(r"(.*?)\((.*)\)", label)
    return (found[1], found[2].split(", ")) if found else (label, [])
