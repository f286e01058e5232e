"""Scan over the states of consecutive chunks.

With S_j the sums of chunk j relative to e^(r_j), feature by feature, the state after chunk n is

    R_n = max_{j≤n} r_j,   P_n = Σ_{j≤n} e^(r_j − R_n) S_j:

for each feature one lower-triangular matrix of factors times the sums of all chunks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.linear.segments.scaled import floor
from efficient_attn.ops.linear.state import LinearState

# Chunks that one product takes; more are scanned in groups of this number, then over the groups.
_RADIX = 160


def running_states(states: LinearState, *, reverse: bool = False) -> LinearState:
    """The state after each chunk, or from each chunk on, [flat_heads chunks …]."""
    if reverse:
        turned = running_states(LinearState(*(x.flip(1) for x in states)))
        return LinearState(*(x.flip(1) for x in turned))
    chunks = states.sums.shape[1]
    if chunks <= _RADIX:
        return _running(states)
    groups = -(-chunks // _RADIX)
    missing = groups * _RADIX - chunks
    padded = (
        F.pad(x, (0, 0, 0, 0, 0, missing), value=value)
        for x, value in zip(states, (0.0, -torch.inf), strict=True)
    )
    within = _running(LinearState(*(x.unflatten(1, (groups, _RADIX)).flatten(0, 1) for x in padded)))
    within = LinearState(*(x.unflatten(0, (len(states.sums), groups)) for x in within))
    totals = running_states(LinearState(*(x[:, :, -1] for x in within)))
    before = (
        F.pad(x[:, :-1], (0, 0, 0, 0, 1, 0), value=value).unsqueeze(2)
        for x, value in zip(totals, (0.0, -torch.inf), strict=True)
    )
    return LinearState(*(x.flatten(1, 2)[:, :chunks] for x in _merged(within, LinearState(*before))))


def _running(states: LinearState) -> LinearState:
    reference = states.log_scale.detach().cummax(dim=1).values
    # [flat_heads features|1 chunks …]: with one scale for all features their sums are one row.
    scales, upto = (x.squeeze(2).mT for x in (states.log_scale, reference))
    factors = (scales.unsqueeze(-2) - floor(upto).unsqueeze(-1)).exp().tril()
    rows = states.sums.unflatten(2, (scales.shape[1], -1)).transpose(1, 2)
    sums = factors @ rows.flatten(3)
    return LinearState(sums.unflatten(3, rows.shape[3:]).transpose(1, 2).flatten(2, 3), reference)


def _merged(one: LinearState, other: LinearState) -> LinearState:
    reference = torch.maximum(one.log_scale, other.log_scale)
    sums: list[Tensor] = [(x.log_scale - floor(reference)).exp().mT * x.sums for x in (one, other)]
    return LinearState(sums[0] + sums[1], reference)
