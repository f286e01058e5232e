"""`efficient-attn gpu-check`: fused kernels checked and timed on this machine's GPU."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from efficient_attn.errors import OptionError

from . import DONE, REGRESSION, SOME_NOT_MEASURED, console
from .flags import OutOption


def gpu_check_command(
    out: OutOption = None,
    device: Annotated[str, typer.Option(help="auto, cuda or cuda:1.")] = "auto",
    check_only: Annotated[
        bool, typer.Option("--check-only", help="Check the kernels without timing them.")
    ] = False,
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Time limit for timing; other calls are skipped.")
    ] = "10m",
    show: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Show stored results; run nothing.")
    ] = None,
) -> int:
    """Check and time the fused kernels on this GPU.

    A fused kernel is used only on machines where it has passed this check; elsewhere PyTorch operators run.
    The check takes up to three minutes. It writes a folder to share, without user or host names.

    Example: efficient-attn gpu-check --out results/gpu/h100
    """
    from efficient_attn.measure.units import parse_seconds
    from efficient_attn.tools import gpu_check

    if show is not None:
        if out is not None:
            raise OptionError("--show runs nothing; leave --out out.")
        outcome = gpu_check.show_gpu_check(show)
    else:
        budget_s = parse_seconds(budget, name="--budget")
        # Text of the compiler goes to stderr.
        with redirect_stdout(sys.stderr):
            outcome = gpu_check.gpu_check(
                out=out, device=device, measure=not check_only, budget_s=budget_s, say=console.say
            )
    console.print_tables(outcome.tables())
    for sentence in outcome.sentences():
        console.tell(sentence)
    if "failed" in outcome.outcomes:
        return REGRESSION
    return SOME_NOT_MEASURED if "refused" in outcome.outcomes else DONE
