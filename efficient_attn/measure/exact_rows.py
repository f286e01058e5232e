"""Errors of some rows of an output, against exact softmax attention of these rows in float64."""

import math
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from efficient_attn.backend import Backend
from efficient_attn.errors import DataError

# Fewest rows, and the share of all rows where that is more.
_FEWEST, _SHARE = 64, 0.01
# Rows of a head without which its variance is unknown.
_LEAST = 2
# Scores computed at a time.
_ENTRIES_AT_ONCE = 1 << 23

Floats: TypeAlias = NDArray[np.float64]
Inputs: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor | None]


class Sample(NamedTuple):
    """Squared norms of the error and of the exact output of some rows of one head, and its number of rows."""

    errors: Floats
    exact: Floats
    of: int


@torch.no_grad()
def sample_rows(
    backend: Backend, inputs: Inputs, out: Tensor, *, rows: int | None, seed: int
) -> list[Sample]:
    """A sample of every head of every batch entry, of random rows.

    Args:
        inputs: q, k, v and the key mask of the call.
        out: Its output, [batch heads q_tokens value_dim].
        rows: Number of rows in all; None: 64 or 1 % of all, whichever is more.

    Raises:
        DataError: If a row of the output is not finite.
    """
    q, k, v, key_mask = inputs
    masks = [None] * len(q) if key_mask is None else list(key_mask)
    real = [_real_tokens(q.shape[2], mask, causal=backend.problem.causal) for mask in masks]
    of, generator, samples = q.shape[1] * sum(map(len, real)), torch.Generator("cpu").manual_seed(seed), []
    wanted = max(_FEWEST, math.ceil(_SHARE * of)) if rows is None else rows
    for entry, (mask, tokens) in enumerate(zip(masks, real, strict=True)):
        # Rows of padding are drawn from the other entries, in proportion to their tokens.
        each = math.ceil(wanted * len(tokens) / max(of, 1))
        each = min(max(each, _LEAST), len(tokens))
        if each:
            _check_finite(out[entry, :, tokens.to(out.device)])
            drawn = torch.stack([tokens[_positions(len(tokens), each, generator)] for _ in range(q.shape[1])])
            samples += _samples(backend, (q[entry], k[entry], v[entry], mask), out[entry], drawn, len(tokens))
    return samples


def _check_finite(out: Tensor) -> None:
    """Refuse rows [heads tokens value_dim] without an error."""
    if broken := int((~out.isfinite()).any(dim=-1).sum()):
        raise DataError(
            f"{broken} rows of the output are not finite, whose error is no number; float32 inputs, or "
            "smaller ones, keep an output finite."
        )


def _real_tokens(count: int, mask: Tensor | None, *, causal: bool) -> Tensor:
    """Positions of the queries that are no padding."""
    if mask is None or not (causal or len(mask) == count):
        return torch.arange(count, device="cpu")
    return mask[len(mask) - count :].nonzero().squeeze(-1).cpu()


def _positions(count: int, drawn: int, generator: torch.Generator) -> Tensor:
    """A random position in each of `drawn` equal parts; a position on a border belongs to both."""
    # On the CPU whatever the default device is: a seed means the same rows everywhere.
    random = torch.rand(drawn, generator=generator, dtype=torch.float64, device="cpu")
    places = torch.arange(drawn, device="cpu") + random
    return (places * (count / drawn)).long().clamp_max_(count - 1)


def _samples(
    backend: Backend,
    inputs: Inputs,
    out: Tensor,
    drawn: Tensor,
    of: int,
) -> list[Sample]:
    """Errors of the drawn rows of each head, [heads drawn], of one batch entry."""
    (q, k, v, mask), count = inputs, drawn.shape[1]
    drawn = drawn.to(q.device)
    wide = torch.float32 if q.device.type == "mps" else torch.float64
    keys, values = k.to(wide), v.to(wide)
    if mask is not None:
        keys, values = (x.masked_fill(~mask[None, :, None], 0.0) for x in (keys, values))
    at_once = max(_ENTRIES_AT_ONCE // max(len(q) * k.shape[1], 1), 1)
    errors, exact = torch.empty(2, len(q), count, dtype=wide, device=q.device)
    for start in range(0, count, at_once):
        rows = drawn[:, start : start + at_once]
        part = slice(start, start + rows.shape[1])
        queries, some = (
            x.gather(1, rows.unsqueeze(-1).expand(-1, -1, x.shape[-1])).to(wide) for x in (q, out)
        )
        scores = queries.unflatten(0, (len(k), -1)).flatten(1, 2) @ keys.mT * backend.problem.factor
        hidden = _hidden(rows, q.shape[1], k.shape[1], mask, causal=backend.problem.causal)
        weights = scores.masked_fill_(hidden.view_as(scores), -torch.inf).softmax(dim=-1).nan_to_num_(0.0)
        found = (weights @ values).view(len(q), -1, v.shape[-1])
        errors[:, part], exact[:, part] = (some - found).square().sum(dim=-1), found.square().sum(dim=-1)
    pairs = zip(errors.double().cpu().numpy(), exact.double().cpu().numpy(), strict=True)
    return [Sample(one, other, of) for one, other in pairs]


def _hidden(rows: Tensor, q_tokens: int, k_tokens: int, mask: Tensor | None, *, causal: bool) -> Tensor:
    """True for each key that a drawn row does not see, [heads drawn k_tokens]."""
    hidden = torch.zeros(*rows.shape, k_tokens, dtype=torch.bool, device=rows.device)
    if causal:
        hidden |= torch.arange(k_tokens, device=rows.device) > rows.unsqueeze(-1) + k_tokens - q_tokens
    return hidden if mask is None else hidden | ~mask
