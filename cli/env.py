"""`efficient-attn env`: machine and software of a measurement."""

from collections.abc import Iterator
from typing import Any

from . import console
from .options import DeviceOption, JsonOption


def env_command(as_json: JsonOption = False, device: DeviceOption = "auto") -> None:
    """Show machine and software, as written to every run."""
    from efficient_attn.measure.environment import environment
    from efficient_attn.studies.workload import Workload, settle

    found = environment(device=settle(Workload(device=device)).device)
    if as_json:
        console.put_json(found)
        return
    for name, value in _lines(found):
        console.put(f"{name:32} {value}")


def _lines(values: dict[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _lines(value, f"{above}{name}.")
        elif value not in (None, []):
            yield f"{above}{name}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)
