"""Logarithms of the learned features of Hedgehog (Zhang et al. 2024, section 4.2)."""

import torch
from torch import Tensor


def exponential_map(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """log [exp(Wx + b), exp(−Wx − b)], [… tokens 2·features] (Zhang et al. 2024, eq. 6)."""
    projected = x @ weight.mT + bias
    return torch.cat([projected, -projected], dim=-1)


def softmax_map(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """log [softmax(Wx + b), softmax(−Wx − b)]: each half of the features sums to one."""
    projected = x @ weight.mT + bias
    return torch.cat([projected.log_softmax(dim=-1), (-projected).log_softmax(dim=-1)], dim=-1)


LEARNED_MAPS = {"softmax": softmax_map, "exponential": exponential_map}
