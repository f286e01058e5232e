"""Backends of other packages: found by their entry points, imported when they are asked for."""

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple

from efficient_attn.contained import importing
from efficient_attn.errors import DataError
from efficient_attn.registry import SPECS

GROUP = "efficient_attn.backends"


class Plugin(NamedTuple):
    """A backend that another package says it has.

    Attributes:
        module: What is imported to register it.
        distribution: The package that brings it, None where its files do not say.
        version: Of that package.
    """

    name: str
    module: str
    distribution: str | None
    version: str | None

    def __str__(self) -> str:
        package = " ".join(filter(None, (self.distribution, self.version))) or "of no known package"
        return f"plug-in {self.name!r} ({package})"


@cache
def plugins() -> dict[str, Plugin]:
    """The plug-ins by the names of their backends; none of them is imported."""
    return {point.name: _plugin(point) for point in entry_points(group=GROUP)}


def _plugin(point: EntryPoint) -> Plugin:
    package = point.dist
    of_package = (None, None) if package is None else (package.name, package.version)
    return Plugin(point.name, point.value, *of_package)


def load_plugin(name: str) -> None:
    """Import the plug-in, which puts its backend into the table.

    Raises:
        DataError: If it cannot be imported, or does not register what its name says.
    """
    found = plugins()[name]
    with importing(f"The {found}"):
        EntryPoint(name, found.module, GROUP).load()
    if name not in SPECS:
        raise DataError(f"The {found} was to register a backend of that name and did not.")


def complaints(ours: tuple[str, ...]) -> list[str]:
    """What the names of plug-ins tell to be wrong with them, one sentence each.

    Args:
        ours: Names of the backends that no plug-in can have.
    """
    said = []
    for name, chosen in sorted(plugins().items()):
        rivals = [str(_plugin(point)) for point in entry_points(group=GROUP, name=name)]
        if name in ours:
            said.append(f"Left out is the {chosen}: a backend here has that name.")
        elif len(rivals) > 1:
            said.append(f"Of {', '.join(rivals)} the last is used.")
    return said
