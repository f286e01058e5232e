"""Buffers that a loop over chunks uses again and again."""

from torch import Tensor


class Rooms:
    """Room for numbers by name: the same whenever it is asked for in the same shape."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def __call__(self, name: str, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """An uninitialised tensor of a shape, of the dtype and on the device of another."""
        kept = self._kept.get(name)
        if kept is None or kept.shape != shape:
            kept = self._kept[name] = like.new_empty(shape)
        return kept
