"""Backends of other packages: found by entry points, imported on first use."""

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple

from efficient_attn.contained import importing
from efficient_attn.errors import DataError
from efficient_attn.registry import SPECS

GROUP = "efficient_attn.backends"


class Plugin(NamedTuple):
    """A backend that another package declares.

    Attributes:
        module: Module whose import registers the backend.
        distribution: Package that declares it; None if unknown.
        version: Version of the package.
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
    """All plug-ins by backend name; none is imported."""
    return {point.name: _plugin(point) for point in entry_points(group=GROUP)}


def _plugin(point: EntryPoint) -> Plugin:
    package = point.dist
    of_package = (None, None) if package is None else (package.name, package.version)
    return Plugin(point.name, point.value, *of_package)


def load_plugin(name: str) -> None:
    """Import a plug-in, which registers its backend.

    Raises:
        DataError: If the import fails or does not register the declared name.
    """
    plugin = plugins()[name]
    with importing(f"The {plugin}"):
        EntryPoint(name, plugin.module, GROUP).load()
    if name not in SPECS:
        raise DataError(f"The {plugin} did not register a backend of that name.")


def complaints(ours: tuple[str, ...]) -> list[str]:
    """Warnings about the names of plug-ins, one sentence each.

    Args:
        ours: Names of the built-in backends, which no plug-in may take.
    """
    said = []
    for name, chosen in sorted(plugins().items()):
        rivals = [str(_plugin(point)) for point in entry_points(group=GROUP, name=name)]
        if name in ours:
            said.append(f"The {chosen} is ignored: a built-in backend has that name.")
        elif len(rivals) > 1:
            said.append(f"Several packages declare one backend, and the last is used: {', '.join(rivals)}.")
    return said
