"""Scratch buffers that a loop over chunks reuses."""

import math

from torch import Tensor


class Scratch:
    """Named scratch buffers; a call with a known name returns the same memory while it is large enough."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def __call__(self, name: str, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """An uninitialised tensor of this shape, with the dtype and device of `like`."""
        kept, size = self._kept.get(name), math.prod(shape)
        if kept is None or kept.numel() < size:
            kept = self._kept[name] = like.new_empty(size)
        return kept[:size].view(shape)
