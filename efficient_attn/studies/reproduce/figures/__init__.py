"""One package per figure or table of a paper. A package placed here is registered.

A package imports torch inside functions only, so that the list of figures stays quick.
"""

import importlib
import pkgutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from efficient_attn.errors import UnknownNameError
from efficient_attn.runner.record import Record
from efficient_attn.studies.plan import Plan

# Help texts are shown without numpy.
if TYPE_CHECKING:
    from efficient_attn.report.figures import Plot
    from efficient_attn.report.table import Table
    from efficient_attn.stats.verdicts import Finding


class Setting(NamedTuple):
    """Amount of measuring.

    Attributes:
        rounds: Timing rounds per point.
        quick: Small sizes, which show that it works and nothing else.
    """

    threads: int
    rounds: int = 4
    quick: bool = False


class Figure(Protocol):
    """Contents of a package of this folder.

    Attributes:
        TITLE: Subject of the figure or table.
        PAPER: Authors, year, title, address.
    """

    TITLE: str
    PAPER: str

    @staticmethod
    def plan(setting: Setting) -> Plan:
        """All points; runs nothing."""

    @staticmethod
    def findings(records: Sequence[Record]) -> "list[Finding]":
        """A verdict on every claim, computed from the records."""

    @staticmethod
    def tables(records: Sequence[Record]) -> "list[Table]":
        """The numbers as the paper prints them, with our numbers."""

    @staticmethod
    def draw(records: Sequence[Record]) -> "Plot":
        """A plot in the paper's quantities."""


def list_figures() -> tuple[str, ...]:
    """The names of all figures, sorted."""
    return tuple(sorted(package.name.replace("_", "-") for package in pkgutil.iter_modules(__path__)))


def find(name: str) -> Figure:
    """The figure of that name.

    Raises:
        UnknownNameError: If there is none.
    """
    if name not in list_figures():
        raise UnknownNameError("figure", name, list_figures())
    module: Any = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    return module
