"""One module per figure or table of a paper. A module placed here is registered.

It holds `TITLE` and `PAPER`, and four functions: `plan(setting)` makes the points and runs nothing, and of
records `findings` makes a verdict on every claim, `tables` the numbers as the paper prints them, and `draw`
a plot in the paper's quantities. It imports torch inside functions only, so that the list stays quick.
"""

import importlib
import pkgutil
from typing import Any, NamedTuple

from efficient_attn.errors import UnknownNameError


class Setting(NamedTuple):
    """Amount of measuring.

    Attributes:
        rounds: Timing rounds per point.
        quick: Small sizes, which show that it works and nothing else.
    """

    threads: int
    rounds: int = 4
    quick: bool = False


def list_figures() -> tuple[str, ...]:
    """The names of all figures, sorted."""
    return tuple(sorted(package.name.replace("_", "-") for package in pkgutil.iter_modules(__path__)))


def find(name: str) -> Any:
    """The figure of that name.

    Raises:
        UnknownNameError: If there is none.
    """
    if name not in list_figures():
        raise UnknownNameError("figure", name, list_figures())
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
