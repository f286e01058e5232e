"""Where the error of an output comes from: what all draws have in common, how they differ, and rounding."""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from efficient_attn.shapes import Keys, Output, Queries, Values


class Parts(NamedTuple):
    """Shares of ‖exact‖; the squares of bias and spread add up to the mean square of the error.

    Attributes:
        bias: Of the mean over all possible draws, estimated without its own noise, at least 0.
        spread: Root mean square distance of a draw from that mean; None for a single draw.
        rounding: Root mean square distance from the same draws computed in float64.
    """

    bias: float
    spread: float | None
    rounding: float


def parts(
    outputs: Sequence[Output], exact: Output, backends: Sequence[Any], q: Queries, k: Keys, v: Values
) -> Parts:
    """The parts of the error of outputs, one for each backend: the draws of one."""
    size = float(exact.square().sum())
    stack = torch.stack([output.double() for output in outputs])
    mean, draws = stack.mean(dim=0), len(outputs)
    distance = float((mean - exact).square().sum()) / size
    variance = None
    if draws > 1:
        variance = float((stack - mean).square().sum()) / (draws - 1) / size
        # The mean of a few draws is off by their own spread.
        distance = max(distance - variance / draws, 0.0)
    wide = [copy.deepcopy(backend).double()(q.double(), k.double(), v.double()) for backend in backends]
    rounding = float((stack - torch.stack(wide)).square().sum()) / draws / size
    return Parts(distance**0.5, None if variance is None else variance**0.5, rounding**0.5)
