"""Names of inputs that stand for several layers of one model, and the names of their single layers."""

import re
from collections.abc import Sequence

_SEVERAL = re.compile(r"(.*)\(layers=(\d+(?:,\d+)*)\)", re.DOTALL)
_SINGLE = re.compile(r"(.*)\(layer=(\d+)\)", re.DOTALL)


def joint_name(names: Sequence[str]) -> str:
    """`encoder(layers=0,1,5)` for the inputs `encoder(layer=0)`, `encoder(layer=1)`, `encoder(layer=5)`."""
    found = [_SINGLE.fullmatch(name) for name in names]
    if len(names) == 1 or not all(found):
        return names[0]
    return f"{names[0].rpartition('(')[0]}(layers={','.join(one[2] for one in found if one)})"


def is_layer(inputs: str) -> bool:
    """Whether the name denotes one layer of a model."""
    return _SINGLE.fullmatch(inputs) is not None


def single_names(inputs: str) -> tuple[str, ...]:
    """The inputs behind a joint name; any other name stands for itself."""
    found = _SEVERAL.fullmatch(inputs)
    return tuple(f"{found[1]}(layer={layer})" for layer in found[2].split(",")) if found else (inputs,)


def timed_layer(inputs: str) -> str:
    """`layer 1` for `encoder(layers=0,1,5)`: the layer whose q, k and v were timed."""
    names = single_names(inputs)
    return f"layer {names[len(names) // 2].rpartition('=')[2].removesuffix(')')}"
