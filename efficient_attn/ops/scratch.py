"""Buffers that a loop over chunks uses again and again."""

import math

from torch import Tensor


class Scratch:
    """Room for numbers by name: the same whenever it is asked for, as long as it is large enough."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def __call__(self, name: str, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """An uninitialised tensor of a shape, of the dtype and on the device of another."""
        kept, size = self._kept.get(name), math.prod(shape)
        if kept is None or kept.numel() < size:
            kept = self._kept[name] = like.new_empty(size)
        return kept[:size].view(shape)
