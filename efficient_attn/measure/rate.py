"""How many operations a second the machine reaches in the products of large matrices.

What a backend reaches beside it tells whether arithmetic keeps it busy, or memory and small kernels do.
"""

from typing import Any

from efficient_attn.measure import clock

# Squares double from one side to the other, until a single product takes this long.
_FIRST_SIDE, _LAST_SIDE, _LONG_S = 256, 8192, 0.02
_CALLS = 5


def product_rate(dtype: str, device: str) -> float:
    """Operations per second of `torch.matmul` on squares, with the threads that torch has now.

    A multiplication and an addition are two operations. Of all sizes and calls the fastest counts: other work
    on the machine only ever takes from the rate.
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
    """Seconds of the fastest product; a first one, which may load what later ones need, is left out."""
    import torch

    with torch.no_grad():
        return min([time_call(lambda: one @ other) for _ in range(1 + _CALLS)][1:])
