"""Maximum path length between the first and the last token, measured from gradients.

A hop is the work that all tokens do in parallel: a layer, or one step of a recurrent layer. A gradient at the
last output is propagated back hop by hop until it is not exactly zero at the first input; the number of hops
is the path length. Rescaling between hops preserves zeros and prevents underflow.
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
        hop_at: The map of a hop, counted from 0, from all tokens to all tokens; float64.
        shape: Shape of the input and output of a hop, [… tokens dim].
        inputs: Slice of this tensor that holds the tokens' inputs, if a hop takes more than these.
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
