"""`efficient-attn env`: machine and software of a measurement."""

from typing import Annotated

import typer

from . import console
from .flags import JsonOption


def env_command(
    as_json: JsonOption = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
) -> None:
    """Show machine and software, as written to every run."""
    from efficient_attn.measure.environment import environment
    from efficient_attn.report.text import flat
    from efficient_attn.runs.workload import Workload, settle

    description = environment(device=settle(Workload(device=device)).device)
    if as_json:
        console.put_json(description)
        return
    for name, value in flat(description):
        console.put(f"{name:32} {value}")
