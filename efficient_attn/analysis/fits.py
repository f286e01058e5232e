"""How a cost grows with the number of tokens: the power of the part that grows.

A measured cost is a fixed part and a growing one, y = a + b·nᵖ. A straight line through logarithms sees their
mixture and puts p too low wherever the fixed part is felt, so the three numbers are fitted together: for a
given p the best a ≥ 0 and b ≥ 0 are a small linear problem, and p is searched for. Residuals are relative, so
that short and long sequences count alike. The interval holds every p whose residuals are not significantly
larger than those of the best one (an F test, 95 %); it takes four lengths, and is wide where the lengths do
not span enough to tell a fixed part from slow growth. Three lengths always lie on one such curve, which
proves nothing: their power is unclear.

Bytes have no noise, but they have kinks: a workspace grows with the sequence until it holds one block. So for
exact costs the fit begins at the shortest length from which on one curve meets every point.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Powers that are tried: finer than any measurement tells apart.
_POWERS = np.linspace(0.05, 4.0, 1581)

# Three numbers are fitted.
_FEWEST_LENGTHS = 3
_FITTED = 3

# The 95 % quantile of F with one and with 1, 2, 3, … degrees of freedom; the last stands for all above.
_F_QUANTILES = (161.4, 18.51, 10.13, 7.709, 6.608, 5.987, 5.591, 5.318, 5.117, 4.965, 4.844, 4.747, 4.667)

# A cost that changes by less than this share over all lengths does not grow.
_FLAT = 0.01

# One curve meets exact costs if it is nowhere further from them than this share.
_MEETS = 0.005

# A wider interval than this tells linear from quadratic no longer.
_TELLING = 1.0

# Residuals below this are rounding: a relative error of a millionth.
_EXACT = 1e-12


class Growth(NamedTuple):
    """y = fixed + factor·tokens^power, with an interval for the power where there are lengths enough.

    Attributes:
        worst: The largest distance of a cost from the curve, as a share of the cost.
    """

    power: float
    low: float | None
    high: float | None
    fixed: float
    factor: float
    worst: float

    @property
    def clear(self) -> bool:
        """Whether there is an interval, narrow enough to tell powers apart; or no growth at all."""
        if self.low is None or self.high is None:
            return self.power == 0
        # At an edge of the powers that were tried the interval is cut off.
        inside = self.low > _POWERS[0] and self.high < _POWERS[-1]
        return bool(inside) and self.high - self.low <= _TELLING


def growth(tokens: Sequence[float], costs: Sequence[float]) -> Growth | None:
    """The fit to positive costs at different lengths; None for fewer than three lengths."""
    n, y = np.asarray(tokens, dtype=float), np.asarray(costs, dtype=float)
    if len(np.unique(n)) < _FEWEST_LENGTHS or (y <= 0).any():
        return None
    if y.max() - y.min() <= _FLAT * y.max():
        return Growth(0.0, None, None, float(y.mean()), 0.0, float(np.ptp(y) / y.max()))
    # The longest length is the unit, so that nᵖ is at most 1 for every p.
    unit = n.max()
    fixed, factor = _best_parts(n / unit, y)
    fitted = fixed[:, None] + factor[:, None] * (n / unit) ** _POWERS[:, None]
    residuals = ((fitted / y - 1) ** 2).sum(axis=1)
    best = int(residuals.argmin())
    low, high = _interval(residuals, freedom=len(n) - _FITTED)
    power = float(_POWERS[best])
    worst = float(np.abs(fitted[best] / y - 1).max())
    return Growth(power, low, high, float(fixed[best]), float(factor[best] / unit**power), worst)


def exact_growth(tokens: Sequence[float], costs: Sequence[float]) -> Growth | None:
    """The fit to costs without noise, in rising order of tokens, from where on one curve meets them all.

    At least four lengths are kept; where no four of them lie on one curve, all are fitted.
    """
    for start in range(len(tokens) - _FITTED):
        fit = growth(tokens[start:], costs[start:])
        if fit is not None and fit.worst <= _MEETS:
            return fit
    return growth(tokens, costs)


def _best_parts(n: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For every power the a ≥ 0 and b ≥ 0 of least squared relative residuals, |a/y + b·nᵖ/y - 1|²."""
    u, w = 1 / y, n ** _POWERS[:, None] / y  # w [powers lengths]
    uu, uw, ww, u1, w1 = u @ u, w @ u, (w * w).sum(axis=1), u.sum(), w.sum(axis=1)
    determinant = uu * ww - uw**2
    fixed, factor = (u1 * ww - w1 * uw) / determinant, (w1 * uu - u1 * uw) / determinant
    # Outside the quadrant the best point lies on one of its edges, the one that leaves less.
    edge_is_fixed = u1**2 / uu >= w1**2 / ww
    outside = ~((fixed >= 0) & (factor >= 0))
    fixed = np.where(outside, np.where(edge_is_fixed, u1 / uu, 0.0), fixed)
    factor = np.where(outside, np.where(edge_is_fixed, 0.0, w1 / ww), factor)
    return fixed, factor


def _interval(residuals: np.ndarray, *, freedom: int) -> tuple[float | None, float | None]:
    if freedom < 1:
        return None, None
    quantile = _F_QUANTILES[min(freedom, len(_F_QUANTILES)) - 1]
    bound = max(residuals.min(), _EXACT) * (1 + quantile / freedom)
    inside = _POWERS[residuals <= bound]
    return float(inside.min()), float(inside.max())
