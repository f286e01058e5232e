"""Names of call sites: the module whose forward calls attention, and the number of the call in it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import nn


class Site(NamedTuple):
    """A place in a model that calls attention.

    Attributes:
        module: Name of the module whose forward calls it; "" is the model itself.
        number: 0 for the first call in one run of that forward.
    """

    module: str
    number: int

    def __str__(self) -> str:
        name = self.module or "model"
        return f"{name}#{self.number}" if self.number else name


class Position:
    """The module that runs now, and the number of its calls so far.

    A module that runs several times, in a loop, at every step of a diffusion or again for a checkpoint,
    counts anew, so that a site keeps its name.
    """

    def __init__(self) -> None:
        self._running: list[list[Any]] = [["", 0]]

    @property
    def outside(self) -> bool:
        """Whether no forward of a followed module runs."""
        return len(self._running) == 1

    def next_site(self) -> Site:
        """The site of a call that is made now."""
        name, number = self._running[-1]
        self._running[-1][1] += 1
        return Site(name, number)

    @contextmanager
    def followed(self, model: nn.Module | None) -> Iterator[None]:
        """Follow the forwards of a model's modules."""
        with ExitStack() as stack:
            for name, module in () if model is None else model.named_modules():
                stack.callback(module.register_forward_pre_hook(self._entering(name)).remove)
                stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            yield

    def _entering(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            self._running.append([name, 0])

        return enter

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()
