"""Latency and bandwidth between ranks, fitted to measured times of collectives."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from efficient_attn.theory.communication import Link


class FittedLink(NamedTuple):
    """α and β of a link, with their standard errors.

    Attributes:
        latency_s: α, seconds of a step.
        byte_s: β, seconds of a byte.
    """

    latency_s: float
    byte_s: float
    latency_error_s: float
    byte_error_s: float

    @property
    def link(self) -> Link:
        """The link for predictions, whose α and β are never negative."""
        return Link(max(self.latency_s, 0.0), 1 / self.byte_s if self.byte_s > 0 else np.inf)


def fit_link(steps: Sequence[int], sizes_bytes: Sequence[int], times_s: Sequence[float]) -> FittedLink:
    """Least squares of steps · α + bytes · β; relative deviations count, since times span decades.

    Args:
        steps: Steps of each collective: 2 for an all-reduce, 1 for an all-gather.
        sizes_bytes: Bytes that a rank sends in all steps.
    """
    terms = np.stack([steps, sizes_bytes], axis=1) / np.asarray(times_s)[:, None]
    (latency_s, byte_s), squares, *_ = np.linalg.lstsq(terms, np.ones(len(terms)), rcond=None)
    covariance = squares.sum() / max(len(terms) - 2, 1) * np.linalg.inv(terms.T @ terms)
    latency_error_s, byte_error_s = np.sqrt(np.diag(covariance))
    return FittedLink(*map(float, (latency_s, byte_s, latency_error_s, byte_error_s)))
