"""Processes of one run that a launcher such as torchrun started."""

import os
import sys

from efficient_attn.errors import UnsupportedError


def num_processes() -> int:
    """Number of processes that the launcher started; 1 without a launcher."""
    return _number("WORLD_SIZE", 1)


def process_rank() -> int:
    """Rank of this process; 0 without a launcher."""
    return _number("RANK", 0)


def refuse_several(name: str) -> None:
    """Refuse to run in several processes, which would all write the same files; one of them explains.

    Raises:
        UnsupportedError: In the first of several processes; the others exit with code 2.
    """
    if num_processes() == 1:
        return
    if process_rank() > 0:
        sys.exit(2)
    raise UnsupportedError(
        f"{name} runs in one process, and WORLD_SIZE is {num_processes()}: start it without torchrun, which "
        "only train uses."
    )


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default
