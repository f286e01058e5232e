"""Error of a backend on given inputs, by exact attention of random rows."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from efficient_attn.backend import Backend
from efficient_attn.errors import UnsupportedError
from efficient_attn.measure.error import Sample, sample_rows
from efficient_attn.options import whole_number
from efficient_attn.problem import positive_count
from efficient_attn.stats.estimates import OUTSIDE, WIDEST, quantile

# Degrees of freedom of an interval with few rows of each head, unless Satterthwaite's are fewer.
_FREEDOM = 5


class Estimate(NamedTuple):
    """An estimate with a nominal 95 % interval."""

    value: float
    low: float
    high: float


class Audit(NamedTuple):
    """Error of an output against exact softmax attention, from some of its rows.

    Attributes:
        rows: Number of rows with an exact output.
        of: Number of rows of the output.
        relative_error: ‖out − exact‖/‖exact‖ over all rows.
    """

    rows: int
    of: int
    relative_error: Estimate

    def __str__(self) -> str:
        value, low, high = self.relative_error
        return f"relative error {value:.3g} ({low:.3g} to {high:.3g}), from {self.rows} of {self.of} rows"


def audit(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    rows: int | None = None,
    seed: int = 0,
) -> Audit:
    """Error of `backend(q, k, v)` against exact softmax attention in float64, estimated from random rows.

    The cost is one call of the backend and the exact attention of the drawn rows. Equal parts of every head
    have one row each. The interval is Student's, of the logarithm: of 1000 audits of 72 rows on shipped
    layers, 89 to 100 % covered the error. None holds where a few rows have most of the error, which a sample
    misses: `performer-trig` at large norms.

    Args:
        q: [batch heads q_tokens head_dim]; causal queries are the last positions of the keys.
        k: [batch kv_heads k_tokens head_dim].
        v: [batch kv_heads k_tokens value_dim].
        key_mask: bool [batch k_tokens], True for a real token; rows of masked tokens are left out where the
            queries are the last tokens, in causal attention or as many as keys.
        rows: Number of rows with an exact output, in proportion to the real tokens of each batch entry,
            rounded up to as many in each head, at least 2; None: 64 or 1 % of all rows, whichever is more.
        seed: Seed of the rows.

    Raises:
        OptionError, DtypeError: If `rows` or `seed` is no whole number, or out of range.
        DataError: If a row of the output is not finite, which has no error.
        UnsupportedError: If the backend drops weights in training mode, which would count as an error.
        ShapeError, DtypeError, UnsupportedError: If the backend cannot compute the inputs.
    """
    if rows is not None:
        positive_count("rows", rows)
    whole_number("seed", seed)
    drops = getattr(backend.options, "dropout", 0.0) or any(
        isinstance(part, nn.Dropout) and part.p for part in backend.modules()
    )
    if backend.training and drops:
        raise UnsupportedError(
            f"Backend {backend.spec.name!r} is in training mode, where dropout would be taken for an error; "
            "backend.eval() first."
        )
    with torch.no_grad():
        out = backend(q, k, v, key_mask=key_mask)
    samples = sample_rows(backend, (q, k, v, key_mask), out, rows=rows, seed=seed)
    rows, of = sum(len(sample.errors) for sample in samples), sum(sample.of for sample in samples)
    return Audit(rows, of, estimate(samples))


def estimate(samples: list[Sample]) -> Estimate:
    """The relative error over all rows of all heads.

    The logarithm of a ratio of two means varies as the mean of the difference of both, relative. Its freedom
    is that of Satterthwaite (1946), and no more than of one head: a few heads, and in them a few rows, have
    most of the error of a good approximation.
    """
    if not samples:
        return Estimate(0.0, 0.0, 0.0)
    weights = [sample.of / sum(stratum.of for stratum in samples) for sample in samples]
    error = float(np.dot(weights, [sample.errors.mean() for sample in samples]))
    exact = float(np.dot(weights, [sample.exact.mean() for sample in samples]))
    if not error or not exact:
        return Estimate(*3 * [math.inf if error else 0.0])
    value, total, squares = math.sqrt(error / exact), 0.0, 0.0
    for sample, weight in zip(samples, weights, strict=True):
        count = len(sample.errors)
        if count < sample.of:
            difference = sample.errors / error - sample.exact / exact
            part = weight**2 * float(difference.var(ddof=1)) / count * (1 - count / sample.of)
            total, squares = total + part, squares + part**2 / (count - 1)
    if not total:
        return Estimate(value, value, value)
    rows = min(len(sample.errors) for sample in samples)
    freedom = min(total**2 / squares, max(rows - 1, _FREEDOM))
    # Half, for the root.
    factor = math.exp(min(quantile(OUTSIDE, freedom) * math.sqrt(total) / 2, WIDEST))
    return Estimate(value, value / factor, value * factor)
