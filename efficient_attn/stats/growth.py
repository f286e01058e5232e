"""Power of tokens with which a cost grows.

A measured cost is y = a + b·nᵖ, with a fixed and a growing part. A straight line through logarithms mixes
both and underestimates p wherever the fixed part matters, so all three numbers are fitted together: for a
given p the best a ≥ 0 and b ≥ 0 solve a small linear problem, and p is searched for. Residuals are relative,
so that all lengths have equal weight. The interval holds every p whose residuals are not significantly larger
than the smallest (F test, 95 %). It requires four lengths, and is wide if the lengths do not span enough to
separate a fixed part from slow growth. Three lengths always fit exactly: their power is unclear.

Bytes have no noise, but they have kinks: a workspace grows with the sequence until it holds one block. The
fit of exact costs therefore starts at the shortest length from which on one curve meets every point.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from efficient_attn.stats.significance import quantile

# Grid of powers, finer than the resolution of any measurement.
_POWERS = np.linspace(0.05, 4.0, 1581)

# Number of fitted parameters.
_FEWEST_LENGTHS = 3
_FITTED = 3

# Costs that change by less than this share over all lengths are constant.
_FLAT = 0.01

# Largest relative distance of exact costs from a curve that meets them.
_MEETS = 0.005

# Widest interval that separates linear from quadratic growth.
_TELLING = 1.0

# Residuals below this are rounding: a relative error of a millionth.
_EXACT = 1e-12


class Growth(NamedTuple):
    """y = fixed + factor·tokens^power, an interval, and the largest relative distance."""

    power: float
    low: float | None
    high: float | None
    fixed: float
    factor: float
    worst: float

    @property
    def clear(self) -> bool:
        """Whether the power has a narrow enough interval, or is zero."""
        if self.low is None or self.high is None:
            return self.power == 0
        # The interval is truncated at the ends of the grid.
        inside = self.low > _POWERS[0] and self.high < _POWERS[-1]
        return bool(inside) and self.high - self.low <= _TELLING


def growth(tokens: Sequence[float], costs: Sequence[float]) -> Growth | None:
    """Fit positive costs at different lengths; None for fewer than three lengths."""
    n, y = np.asarray(tokens, dtype=float), np.asarray(costs, dtype=float)
    if len(np.unique(n)) < _FEWEST_LENGTHS or (y <= 0).any():
        return None
    if y.max() - y.min() <= _FLAT * y.max():
        return Growth(0.0, None, None, float(y.mean()), 0.0, float(np.ptp(y) / y.max()))
    # Lengths are scaled by the longest, so that nᵖ ≤ 1 for every p.
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
    """Fit costs without noise from the length where a curve meets all.

    At least four lengths are kept; if no four of them lie on one curve, all are fitted.
    """
    for start in range(len(tokens) - _FITTED):
        fit = growth(tokens[start:], costs[start:])
        if fit is not None and fit.worst <= _MEETS:
            return fit
    return growth(tokens, costs)


def _best_parts(n: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Parts a ≥ 0 and b ≥ 0 of least |a/y + b·nᵖ/y − 1|² for each power."""
    u, w = 1 / y, n ** _POWERS[:, None] / y  # w [powers lengths]
    uu, uw, ww, u1, w1 = u @ u, w @ u, (w * w).sum(axis=1), u.sum(), w.sum(axis=1)
    determinant = uu * ww - uw**2
    fixed, factor = (u1 * ww - w1 * uw) / determinant, (w1 * uu - u1 * uw) / determinant
    # The constrained optimum is on the edge of the quadrant with the smaller residual.
    edge_is_fixed = u1**2 / uu >= w1**2 / ww
    outside = ~((fixed >= 0) & (factor >= 0))
    fixed = np.where(outside, np.where(edge_is_fixed, u1 / uu, 0.0), fixed)
    factor = np.where(outside, np.where(edge_is_fixed, 0.0, w1 / ww), factor)
    return fixed, factor


def _interval(residuals: np.ndarray, *, freedom: int) -> tuple[float | None, float | None]:
    if freedom < 1:
        return None, None
    # F with one numerator degree of freedom is the square of Student's t.
    bound = max(residuals.min(), _EXACT) * (1 + quantile(0.025, freedom) ** 2 / freedom)
    inside = _POWERS[residuals <= bound]
    return float(inside.min()), float(inside.max())
