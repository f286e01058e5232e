"""Decomposition of the output error: bias, spread over draws, rounding; errors of normalisation."""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from efficient_attn.errors import UnsupportedError
from efficient_attn.ops.softmax.definition import softmax_weights
from efficient_attn.shapes import Keys, Output, Queries, Values

# Number of queries sampled from long sequences to bound the time.
_ROWS = 512


class Parts(NamedTuple):
    """Shares of ‖exact‖; the squares of bias and spread add up to the mean squared error.

    Attributes:
        bias: Error of the mean over draws, corrected for its own variance, at least 0.
        spread: Root mean square distance of a draw from the mean; None for a single draw.
        rounding: Root mean square distance from the same draws in float64.
    """

    bias: float
    spread: float | None
    rounding: float


def parts(
    outputs: Sequence[Output], exact: Output, backends: Sequence[Any], q: Queries, k: Keys, v: Values
) -> Parts:
    """Decompose the error of outputs, one per backend, which are draws of one variant."""
    size = float(exact.square().sum())
    stack = torch.stack([output.double() for output in outputs])
    mean, draws = stack.mean(dim=0), len(outputs)
    distance = float((mean - exact).square().sum()) / size
    variance = None
    if draws > 1:
        variance = float((stack - mean).square().sum()) / (draws - 1) / size
        # Unbiased estimate: the squared distance includes the variance of the mean of few draws.
        distance = max(distance - variance / draws, 0.0)
    wide = [copy.deepcopy(backend).double()(q.double(), k.double(), v.double()) for backend in backends]
    rounding = float((stack - torch.stack(wide)).square().sum()) / draws / size
    return Parts(distance**0.5, None if variance is None else variance**0.5, rounding**0.5)


class Sums(NamedTuple):
    """Relative errors of the weights in the Frobenius norm, root mean square over draws.

    Attributes:
        exact: Estimated kernel divided by the exact row sums.
        estimated: Estimated kernel divided by its own row sums, as in attention.
    """

    exact: float
    estimated: float


def sums(backends: Sequence[Any], q: Queries, k: Keys, *, scale: float) -> Sums | None:
    """Effect of normalisation on the weights, in float64; None for a backend that estimates no kernel.

    Long sequences are evaluated on at most 512 evenly spaced queries.
    """
    few = q[..., :: -(-q.shape[-2] // _ROWS), :].double()
    keys = k.double()
    weights = softmax_weights(few, keys, scale=scale, key_mask=None)
    size, squares = float(weights.square().sum()), [0.0, 0.0]
    for backend in backends:
        try:
            raw = copy.deepcopy(backend).double().kernel_weights(few, keys)
        except UnsupportedError:
            return None
        for number, found in enumerate((raw, raw / raw.sum(dim=-1, keepdim=True))):
            squares[number] += float((found - weights).square().sum()) / size / len(backends)
    return Sums(squares[0] ** 0.5, squares[1] ** 0.5)
