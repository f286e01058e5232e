"""Peak rate of matrix products on this machine, in operations per second.

The share of it that a backend reaches separates compute-bound backends from memory-bound ones.
"""

from typing import Any

from efficient_attn.measure import clock

# The side of the square matrices doubles until a single product takes this long.
_FIRST_SIDE, _LAST_SIDE, _LONG_S = 256, 8192, 0.02
_CALLS = 5


def product_rate(dtype: str, device: str) -> float:
    """Operations per second of `torch.matmul` on square matrices, with the current number of threads.

    A multiplication and an addition are two operations. The rate is the maximum over sizes and calls, since
    other load can only lower it.
    """
    import torch

    time_call, best, side = clock.clock(device), 0.0, _FIRST_SIDE
    while True:
        one, other = torch.ones(2, side, side, dtype=getattr(torch, dtype), device=device)
        fastest_s = _fastest(one, other, time_call)
        best = max(best, 2 * side**3 / fastest_s)
        if fastest_s > _LONG_S or side >= _LAST_SIDE:
            return best
        side *= 2


def _fastest(one: Any, other: Any, time_call: clock.Clock) -> float:
    """Shortest duration of a product, without the first call, which may load libraries."""
    import torch

    with torch.no_grad():
        return min([time_call(lambda: one @ other) for _ in range(1 + _CALLS)][1:])
