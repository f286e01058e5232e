"""Relative positions of backends that compute scores: a learned bias for each head and distance."""

import torch
from torch import Tensor, nn

from efficient_attn.errors import OptionError, UnsupportedError
from efficient_attn.modules.options import whole_number
from efficient_attn.problem import AttentionProblem

MAX_DISTANCE = "Longest distance with a learned score bias of its own, per head (relative position); 0: none."


def distance_bias(problem: AttentionProblem, max_distance: int) -> nn.Parameter | None:
    """Zeros, [num_heads, 2 max_distance + 1], or of a causal problem [num_heads, max_distance + 1].

    Raises:
        OptionError: If the problem leaves the number of heads open.
    """
    if not (learned := count(problem, max_distance)):
        return None
    if problem.num_heads is None:
        raise OptionError(f"max_distance={max_distance} is a learned bias for each head: give num_heads.")
    return nn.Parameter(torch.zeros(problem.num_heads, learned // problem.num_heads))


def count(problem: AttentionProblem, max_distance: int) -> int:
    """Number of biases, of one head if the problem leaves the number of heads open."""
    whole_number("max_distance", max_distance)
    distances = max_distance + 1 if problem.causal else 2 * max_distance + 1
    return (problem.num_heads or 1) * distances if max_distance else 0


def check_one_sequence(q: Tensor, k: Tensor, *, causal: bool) -> None:
    """Refuse keys of another sequence, from whose tokens queries have no distance."""
    if not causal and q.shape[-2] != k.shape[-2]:
        raise UnsupportedError(
            f"q has {q.shape[-2]} tokens and k has {k.shape[-2]}: relative positions compare tokens of one "
            "sequence; build with max_distance=0 for cross-attention."
        )
