"""How long a signal is on its way from the first token to the last, measured from gradients.

A hop is what all tokens can do at once: a layer, or one step of a recurrent layer. A gradient is put on the
last output and pulled back hop by hop; the path is as long as it takes until it is not exactly zero at the
first input. It is scaled between hops, which no zero notices, so that it never underflows.
"""

from collections.abc import Callable
from typing import Any


def hops_to_the_first_token(
    hop_at: Callable[[int], Callable[[Any], Any]],
    *,
    shape: tuple[int, ...],
    most: int,
    inputs: Any = ...,
    seed: int = 0,
) -> int | None:
    """Hops until the last token's output depends on the first token's input; None if more than `most`.

    Args:
        hop_at: The map from all tokens to all tokens of each hop, counted from 0; float64.
        shape: [… tokens dim] of what a hop takes and gives.
        inputs: Which part of it is the input of the tokens, where a hop takes more than that.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    draw: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    gradient = torch.zeros(shape, dtype=torch.float64)
    gradient[..., -1, :] = torch.randn(gradient[..., -1, :].shape, **draw)
    for hop in range(most):
        x = torch.randn(shape, **draw).requires_grad_()
        (gradient,) = torch.autograd.grad(hop_at(hop)(x), x, gradient)
        if (gradient[inputs][..., 0, :] != 0).any():
            return hop + 1
        largest = gradient.abs().max()
        if largest == 0:
            return None
        gradient /= largest
    return None
